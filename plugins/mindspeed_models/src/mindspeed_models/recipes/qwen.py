"""Qwen2, Qwen2.5 and Qwen3 of Alibaba: biases of q, k, v, or norms of q and k."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    LAYER,
    decoder_arguments,
    decoder_config,
    joined,
    self_attention_norms,
    training_defaults,
)


def no_window(config: Config) -> None:
    """Refuse windows, which these families give to a part of their layers only."""
    reason = "and windows in a part of the layers have no kernel here; published dense models have false"
    Keys(config).only("use_sliding_window", False, reason=reason)


def _qwen2(config: Config) -> ModelPlan:
    no_window(config)
    arguments = {**decoder_arguments(config), "add_qkv_bias": True}
    return ModelPlan("qwen2", arguments, training_defaults(config))


def _qwen3(config: Config) -> ModelPlan:
    no_window(config)
    Keys(config).only("attention_bias", False, reason="and published models of this family have no biases")
    config = {"head_dim": 128, **config}
    return ModelPlan(
        "qwen3", {**decoder_arguments(config), "qk_layernorm": True}, training_defaults(config)
    )


def _qwen2_config(plan: ModelPlan) -> dict[str, Any]:
    return {**decoder_config(plan, "qwen2", "Qwen2ForCausalLM"), "use_sliding_window": False}


def _qwen3_config(plan: ModelPlan) -> dict[str, Any]:
    return {**decoder_config(plan, "qwen3", "Qwen3ForCausalLM"), "use_sliding_window": False}


def _size(layers: int, hidden: int, ffn: int, heads: int, groups: int, tied: bool, **more: Any) -> Config:
    names = "num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads".split()
    sizes = dict(zip(names, (layers, hidden, ffn, heads, groups)))
    common = {"vocab_size": 151936, "rope_theta": 1e6, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
    return {**common, **sizes, "tie_word_embeddings": tied, **more}


_TINY = {"vocab_size": 256, "max_position_embeddings": 256}
QWEN2 = Recipe(
    name="qwen2",
    summary="Qwen2: biases of query, key and value",
    model_types=("qwen2",),
    plan=_qwen2,
    config=_qwen2_config,
    rows=(*DECODER, joined("bias")),
    sizes={
        "tiny": _size(2, 64, 176, 4, 2, True, **_TINY),
        "0.5b": _size(24, 896, 4864, 14, 2, True),
        "1.5b": _size(28, 1536, 8960, 12, 2, True),
        "7b": _size(28, 3584, 18944, 28, 4, False, vocab_size=152064),
        "72b": _size(80, 8192, 29568, 64, 8, False, vocab_size=152064),
    },
    chat_template="chatml",
)
QWEN25 = Recipe(
    name="qwen2.5",
    summary="Qwen2.5, the architecture of Qwen2",
    plan=_qwen2,
    config=_qwen2_config,
    rows=QWEN2.rows,
    sizes={
        **QWEN2.sizes,
        "3b": _size(36, 2048, 11008, 16, 2, True),
        "14b": _size(48, 5120, 13824, 40, 8, False, vocab_size=152064, rms_norm_eps=1e-5),
        "32b": _size(64, 5120, 27648, 40, 8, False, vocab_size=152064, rms_norm_eps=1e-5),
    },
    chat_template="chatml",
)
QWEN3 = Recipe(
    name="qwen3",
    summary="Qwen3: norms of query and key, heads of their own size",
    model_types=("qwen3",),
    plan=_qwen3,
    config=_qwen3_config,
    rows=(*DECODER, *self_attention_norms(LAYER)),
    sizes={
        "tiny": _size(2, 64, 176, 4, 2, True, head_dim=32, **_TINY),
        "0.6b": _size(28, 1024, 3072, 16, 8, True, head_dim=128, max_position_embeddings=40960),
        "1.7b": _size(28, 2048, 6144, 16, 8, True, head_dim=128, max_position_embeddings=40960),
        "4b": _size(36, 2560, 9728, 32, 8, True, head_dim=128, max_position_embeddings=40960),
        "8b": _size(36, 4096, 12288, 32, 8, False, head_dim=128, max_position_embeddings=40960),
        "14b": _size(40, 5120, 17408, 40, 8, False, head_dim=128, max_position_embeddings=40960),
        "32b": _size(64, 5120, 25600, 64, 8, False, head_dim=128, max_position_embeddings=40960),
    },
    chat_template="chatml",
)
RECIPES = (QWEN2, QWEN25, QWEN3)
