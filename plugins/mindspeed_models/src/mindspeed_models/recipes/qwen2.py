"""Qwen2 and Qwen2.5 of Alibaba: biases of query, key and value."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    decoder_arguments,
    decoder_config,
    decoder_size,
    joined,
    training_defaults,
)


def no_window(config: Config) -> None:
    """Refuse windows, which these families give to a part of their layers only."""
    reason = "and windows in a part of the layers have no kernel here; published dense models have false"
    Keys(config).only("use_sliding_window", False, reason=reason)


def _plan(config: Config) -> ModelPlan:
    no_window(config)
    arguments = {**decoder_arguments(config), "add_qkv_bias": True}
    return ModelPlan("qwen2", arguments, training_defaults(config))


def _config(plan: ModelPlan) -> dict[str, Any]:
    return {**decoder_config(plan, "qwen2", "Qwen2ForCausalLM"), "use_sliding_window": False}


def qwen_size(layers: int, hidden: int, ffn: int, heads: int, groups: int, tied: bool, **more: Any) -> Config:
    """Return the ``config.json`` of one size."""
    common = {"rope_theta": 1e6, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    vocab = more.pop("vocab_size", 151936)
    sizes = decoder_size(layers, hidden, ffn, heads, groups, vocab, **common)
    return {**sizes, "tie_word_embeddings": tied, **more}


_TINY = {"vocab_size": 256, "max_position_embeddings": 256}
QWEN2 = Recipe(
    name="qwen2",
    summary="Qwen2: biases of query, key and value",
    model_types=("qwen2",),
    plan=_plan,
    config=_config,
    rows=(*DECODER, joined("bias")),
    sizes={
        "tiny": qwen_size(2, 64, 176, 4, 2, True, **_TINY),
        "0.5b": qwen_size(24, 896, 4864, 14, 2, True),
        "1.5b": qwen_size(28, 1536, 8960, 12, 2, True),
        "7b": qwen_size(28, 3584, 18944, 28, 4, False, vocab_size=152064),
        "72b": qwen_size(80, 8192, 29568, 64, 8, False, vocab_size=152064),
    },
    chat_template="chatml",
)
QWEN25 = Recipe(
    name="qwen2.5",
    summary="Qwen2.5, the architecture of Qwen2",
    plan=_plan,
    config=_config,
    rows=QWEN2.rows,
    sizes={
        **QWEN2.sizes,
        "3b": qwen_size(36, 2048, 11008, 16, 2, True),
        "14b": qwen_size(48, 5120, 13824, 40, 8, False, vocab_size=152064, rms_norm_eps=1e-5),
        "32b": qwen_size(64, 5120, 27648, 40, 8, False, vocab_size=152064, rms_norm_eps=1e-5),
    },
    chat_template="chatml",
)
RECIPES = (QWEN2, QWEN25)
