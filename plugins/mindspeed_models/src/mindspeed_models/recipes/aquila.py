"""Aquila of BAAI: LLaMA's layers."""

from __future__ import annotations

from typing import Any

from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    decoder_arguments,
    decoder_config,
    decoder_size,
    training_defaults,
)


def _aquila(config: Config) -> ModelPlan:
    return ModelPlan(
        "aquila", decoder_arguments(config), {**training_defaults(config), "init_method_std": 0.01}
    )


def _aquila_config(plan: ModelPlan) -> dict[str, Any]:
    return decoder_config(plan, "aquila", "AquilaForCausalLM")


_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
AQUILA = Recipe(
    name="aquila",
    summary="Aquila: LLaMA's layers, initialized with a smaller deviation",
    model_types=("aquila",),
    plan=_aquila,
    config=_aquila_config,
    rows=DECODER,
    sizes={
        "tiny": decoder_size(2, 64, 176, 4, 4, 256, **_COMMON),
        "7b": decoder_size(32, 4096, 11008, 32, 32, 100008, **_COMMON),
    },
    chat_template="aquila",
)
RECIPES = (AQUILA,)
