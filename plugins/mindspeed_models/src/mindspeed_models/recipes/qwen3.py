"""Qwen3 of Alibaba: norms of query and key, heads of their own size."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    QK_NORMS,
    decoder_arguments,
    decoder_config,
    training_defaults,
)
from mindspeed_models.recipes.qwen2 import no_window, qwen_size


def _plan(config: Config) -> ModelPlan:
    no_window(config)
    Keys(config).only("attention_bias", False, reason="and published models of this family have no biases")
    config = {"head_dim": 128, **config}
    return ModelPlan("qwen3", {**decoder_arguments(config), "qk_layernorm": True}, training_defaults(config))


def _config(plan: ModelPlan) -> dict[str, Any]:
    return {**decoder_config(plan, "qwen3", "Qwen3ForCausalLM"), "use_sliding_window": False}


_MORE = {"head_dim": 128, "max_position_embeddings": 40960}
_OF_TINY = {"head_dim": 32, "max_position_embeddings": 256, "vocab_size": 256}
QWEN3 = Recipe(
    name="qwen3",
    summary="Qwen3: norms of query and key, heads of their own size",
    model_types=("qwen3",),
    plan=_plan,
    config=_config,
    rows=(*DECODER, *QK_NORMS),
    sizes={
        "tiny": qwen_size(2, 64, 176, 4, 2, True, **_OF_TINY),
        "0.6b": qwen_size(28, 1024, 3072, 16, 8, True, **_MORE),
        "1.7b": qwen_size(28, 2048, 6144, 16, 8, True, **_MORE),
        "4b": qwen_size(36, 2560, 9728, 32, 8, True, **_MORE),
        "8b": qwen_size(36, 4096, 12288, 32, 8, False, **_MORE),
        "14b": qwen_size(40, 5120, 17408, 40, 8, False, **_MORE),
        "32b": qwen_size(64, 5120, 25600, 64, 8, False, **_MORE),
    },
    chat_template="chatml",
)
RECIPES = (QWEN3,)
