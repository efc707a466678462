"""A small LLaMA in Hugging Face's files, without transformers: for tests of whatever reads such files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 250,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}


def tensors_of(config: dict[str, Any], seed: int = 3) -> dict[str, torch.Tensor]:
    """Return random weights by the names of the files."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    size = hidden // config["num_attention_heads"]
    kept = config["num_key_value_heads"] * size

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    found = {"model.embed_tokens.weight": weight(vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kept, hidden),
            "self_attn.v_proj": (kept, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        found |= {f"{prefix}{name}.weight": weight(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{name}.weight"] = 1 + weight(hidden)
    found["model.norm.weight"] = 1 + weight(hidden)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = weight(vocab, hidden)
    return found


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write float32 tensors into a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in tensors.items():
        end = begin + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    content = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def write_small_llama(folder: Path, *, seed: int = 3, **config: Any) -> Path:
    """Write ``config.json`` and ``model.safetensors``; return the folder.

    Args:
        folder: is made where it is missing.
        seed: of the weights.
        config: other values of ``config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {**CONFIG, **config}
    (folder / "config.json").write_text(json.dumps(content))
    write_safetensors(folder / "model.safetensors", tensors_of(content, seed))
    return folder
