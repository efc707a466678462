"""Tiny published-style models of every family, with the logits that transformers gives for them.

Weights are larger than at initialization, and norms differ from one: a wrong mapping shows in the logits.
Families without a class in transformers are made from one that computes the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SEQUENCE, VOCABULARY = 16, 250
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"type": "llama", **_SIZES},
    "llama-mqa": {"type": "llama", **_SIZES, "num_key_value_heads": 1},
    "llama3": {"type": "llama", **_SIZES, "rope_theta": 5e5, "rope_scaling": _LLAMA3},
    "aquila": {"type": "llama", **_SIZES, "num_key_value_heads": 4},
    "internlm": {"type": "llama", **_SIZES, "num_key_value_heads": 4, "attention_bias": True},
    "baichuan": {"type": "llama", **_SIZES, "num_key_value_heads": 4},
    "baichuan2": {"type": "llama", **_SIZES, "num_key_value_heads": 4},
    # Six heads: no power of two, so that slopes are those of two series.
    "baichuan-13b": {
        "type": "llama",
        **_SIZES,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    },
    "baichuan2-13b": {"type": "llama", **_SIZES, "num_key_value_heads": 4},
    "qwen2": {"type": "qwen2", **_SIZES, "tie_word_embeddings": True},
    "qwen3": {"type": "qwen3", **_SIZES, "head_dim": 32},
    "qwen3-moe": {"type": "qwen3_moe", **_SIZES, **_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "mistral": {"type": "mistral", **_SIZES, "sliding_window": 8},
    "mixtral": {
        "type": "mixtral",
        **_SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "gemma": {"type": "gemma", **_SIZES, "head_dim": 32, "tie_word_embeddings": True},
    "bloom": {"type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 4, "n_head": 4},
    "deepseek-v2": {
        "type": "deepseek_v2",
        **_SIZES,
        **_LATENT,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": None,
        "topk_group": None,
        "norm_topk_prob": False,
    },
    "deepseek-v2-groups": {
        "type": "deepseek_v2",
        **_SIZES,
        **_LATENT,
        "q_lora_rank": 16,
        "topk_method": "group_limited_greedy",
        # Two experts of each of two groups: a sum of two and the best one choose other groups.
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "deepseek-v3": {
        "type": "deepseek_v3",
        **_SIZES,
        **_LATENT,
        "q_lora_rank": 16,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "rope_scaling": _YARN,
        "num_nextn_predict_layers": 0,
    },
}


def make(name: str, folder: Path, *, seed: int = 0, **more: Any) -> None:
    """Write a model with ``config.json``, weights, and ``reference.pt`` with token ids and logits.

    Args:
        name: of the model.
        folder: receives it.
        seed: of its weights.
        more: further values of its configuration.
    """
    model = built(name, seed, **more)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    ids = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    torch.save({"ids": ids, "logits": reference(name, model, ids)}, folder / "reference.pt")
    REWRITTEN.get(name, lambda folder: None)(folder)


def oracle(name: str, *, seed: int = 0, **more: Any) -> Any:
    """Return transformers' own model of the weights that `make` writes."""
    model = built(name, seed, **more)
    _normalize_head(name, model)
    return model


def built(name: str, seed: int = 0, models: dict[str, dict[str, Any]] = MODELS, **more: Any) -> Any:
    """Return a model of transformers with the sizes of a name, and large weights."""
    import transformers

    given = {**models[name], **more}
    kind = given.pop("type")
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **given)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval()
    inflate(model)
    return model


@torch.no_grad()
def _normalize_head(name: str, model: Any) -> None:
    if name.startswith("baichuan2"):
        model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight, dim=-1))


@torch.no_grad()
def reference(name: str, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a family; a class that computes something else is changed for it, and is spent."""
    given = {}
    if name.endswith("-13b"):
        model.model.rotary_emb = _NoRotation()
        given["attention_mask"] = linear_biases(model.config.num_attention_heads, ids.shape[1])
    _normalize_head(name, model)
    logits: torch.Tensor = model(ids, **given).logits
    return logits


class _NoRotation(torch.nn.Module):
    """Rotary positions that leave queries and keys as they are."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, _SIZES["hidden_size"] // _SIZES["num_attention_heads"])
        return hidden.new_ones(shape), hidden.new_zeros(shape)


def linear_biases(heads: int, length: int) -> torch.Tensor:
    """Return what attention adds to scores ``[1, n, s, s]``: minus slope times distance, later keys hidden.

    Slopes are a geometric series for a power of two; for other numbers of heads the series of the next lower
    power, and then every second one of the next higher power (Press et al., 2022).
    """

    def series(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (head + 1) / count) for head in range(count)]

    power = 1 << (heads.bit_length() - 1)
    slopes = torch.tensor([*series(power), *series(2 * power)[::2]][:heads])
    at = torch.arange(length)
    distance = (at.unsqueeze(1) - at.unsqueeze(0)).float()
    biases = -slopes.view(heads, 1, 1) * distance
    return biases.masked_fill(distance < 0, torch.finfo(torch.float32).min).unsqueeze(0)


@torch.no_grad()
def inflate(model: torch.nn.Module) -> None:
    """Make weights large and norms uneven."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.copy_(
                torch.rand(parameter.shape, generator=generator) + (-0.5 if "bias" in name else 0.5)
            )
            if "bias" in name:
                parameter.mul_(0.2)
        else:
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * (1.3 / math.sqrt(parameter.shape[-1]))
            )
    for name, buffer in model.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) * 0.2)


def rewrite(
    folder: Path, config: Callable[[dict[str, Any]], None], weights: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """Change ``config.json`` and the weights of a folder."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    config(content)
    path.write_text(json.dumps(content, indent=2))
    tensors = load_file(folder / "model.safetensors")
    weights(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _packed(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(_SIZES["num_hidden_layers"]):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{x}_proj.weight") for x in "qkv"]
        tensors[f"model.layers.{layer}.self_attn.W_pack.weight"] = torch.cat(parts)


def _as(kind: str, **more: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config.update(model_type=kind, **more)

    return change


def _biased(**more: Any) -> Callable[[dict[str, Any]], None]:
    """Describe positions as Baichuan's larger models do: by the length they were trained for."""

    def change(config: dict[str, Any]) -> None:
        config.update(model_type="baichuan", **more)
        config["model_max_length"] = config.pop("max_position_embeddings")
        for name in ("rope_parameters", "rope_theta", "rope_scaling"):
            config.pop(name, None)

    return change


REWRITTEN: dict[str, Callable[[Path], None]] = {
    "aquila": lambda folder: rewrite(folder, _as("aquila"), lambda tensors: None),
    "internlm": lambda folder: rewrite(folder, _as("internlm", bias=True), lambda tensors: None),
    "baichuan": lambda folder: rewrite(folder, _as("baichuan"), _packed),
    "baichuan2": lambda folder: rewrite(folder, _as("baichuan", normalized_head=True), _packed),
    "baichuan-13b": lambda folder: rewrite(folder, _biased(), _packed),
    "baichuan2-13b": lambda folder: rewrite(folder, _biased(normalized_head=True), _packed),
}
