"""Mistral of Mistral AI: in its first version with a sliding window."""

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


def mistral_arguments(config: Config) -> dict[str, Any]:
    """Return the flags of a decoder with or without a window."""
    found = decoder_arguments(config)
    width = config.get("sliding_window")
    if width is not None:
        # A query and the w - 1 tokens before it, as transformers counts.
        found["window_size"] = (int(width) - 1, 0)
    return found


def _mistral(config: Config) -> ModelPlan:
    return ModelPlan("mistral", mistral_arguments(config), training_defaults(config))


def _mistral_config(plan: ModelPlan) -> dict[str, Any]:
    window = plan.value("window_size")
    width = None if window is None else window[0] + 1
    return {**decoder_config(plan, "mistral", "MistralForCausalLM"), "sliding_window": width}


def mistral_size(*sizes: int, theta: float = 1e6, longest: int = 32768, **more: Any) -> Config:
    """Return the ``config.json`` of one size."""
    common = {"rms_norm_eps": 1e-5, "rope_theta": theta, "max_position_embeddings": longest}
    return {**decoder_size(*sizes), **common, **more}


MISTRAL = Recipe(
    name="mistral",
    summary="Mistral: query groups, in its first version a sliding window",
    model_types=("mistral",),
    plan=_mistral,
    config=_mistral_config,
    rows=DECODER,
    sizes={
        "tiny": mistral_size(2, 64, 176, 4, 2, 256, longest=256),
        "7b": mistral_size(32, 4096, 14336, 32, 8, 32768),
        "7b-v0.1": mistral_size(32, 4096, 14336, 32, 8, 32000, theta=1e4, sliding_window=4096),
        "nemo-12b": mistral_size(40, 5120, 14336, 32, 8, 131072, head_dim=128, longest=131072),
    },
    chat_template="mistral",
)
RECIPES = (MISTRAL,)
