"""A tiny DeepSeek-V3 with a module that predicts a token further on, which transformers has no class for.

Its layer is one more layer of the decoder; norms, projection and head are computed here, token by token as
the published description says: the norm of the next token's embedding, then that of the hidden state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import MODELS, SEQUENCE, VOCABULARY, built
from torch import Tensor
from torch.nn import functional as F

LAYERS = 4
_NAME = "deepseek-v3-predicting"
_EPS = 1e-6
MODELS_HERE: dict[str, dict[str, Any]] = {
    _NAME: {**MODELS["deepseek-v3"], "num_hidden_layers": LAYERS + 1},
}


@torch.no_grad()
def make_predicting(folder: Path) -> None:
    """Write the model with ``config.json``, weights and ``reference.pt``.

    The reference has token ids, logits, ``further`` logits of the module, ``labels``, and the mean loss of
    the module over the positions that have a token to predict.
    """
    import json

    model: Any = built(_NAME, models=MODELS_HERE)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    extra = _extra_weights()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=generator)
    labels = torch.randint(3, VOCABULARY, (2, SEQUENCE), generator=generator)
    logits, further = _compute(model, extra, ids)
    # The module predicts the label behind each label; behind the last one there is none.
    loss = F.cross_entropy(further[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.save(
        {"ids": ids, "logits": logits, "further": further, "labels": labels, "loss": float(loss)},
        folder / "reference.pt",
    )
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    path.write_text(json.dumps(config, indent=2))
    tensors = load_file(folder / "model.safetensors")
    prefix = f"model.layers.{LAYERS}."
    tensors |= {prefix + name: value for name, value in extra.items()}
    # The published files hold embedding and output layer once more there.
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _extra_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    hidden = MODELS["deepseek-v3"]["hidden_size"]

    def norm() -> Tensor:
        return torch.rand(hidden, generator=generator) + 0.5

    return {
        "enorm.weight": norm(),
        "hnorm.weight": norm(),
        "shared_head.norm.weight": norm(),
        "eh_proj.weight": torch.randn(hidden, 2 * hidden, generator=generator) * 1.3 / (2 * hidden) ** 0.5,
    }


def _compute(model: Any, extra: dict[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the model, and those of the module behind it, ``[b, s, v]`` each."""
    inner = model.model
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    hidden = inner.embed_tokens(ids)
    hidden_mask = torch.full((ids.shape[1], ids.shape[1]), torch.finfo(torch.float32).min).triu(1)
    given = {
        "attention_mask": hidden_mask.expand(1, 1, -1, -1),
        "position_embeddings": inner.rotary_emb(hidden, positions),
        "position_ids": positions,
    }
    for layer in inner.layers[:LAYERS]:
        hidden = layer(hidden, **given)
    hidden = inner.norm(hidden)
    logits = model.lm_head(hidden)
    following = F.pad(ids[:, 1:], (0, 1))
    joined = torch.cat(
        (
            _normed(inner.embed_tokens(following), extra["enorm.weight"]),
            _normed(hidden, extra["hnorm.weight"]),
        ),
        dim=-1,
    )
    ahead = inner.layers[LAYERS](joined @ extra["eh_proj.weight"].t(), **given)
    return logits, model.lm_head(_normed(ahead, extra["shared_head.norm.weight"]))


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS) * weight
