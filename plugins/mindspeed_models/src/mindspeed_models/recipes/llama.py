"""LLaMA and Llama 2 of Meta."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    decoder_arguments,
    decoder_config,
    decoder_size,
    training_defaults,
)


def llama_plan(config: Config) -> ModelPlan:
    """Return the plan of a model without biases."""
    keys = Keys(config)
    for name in ("attention_bias", "mlp_bias"):
        keys.only(
            name,
            False,
            reason="and models of Meta have no biases; use the family internlm for those of q, k, v, o",
        )
    keys.only("pretraining_tp", *range(1, 65), reason="which is no number of parts")
    return ModelPlan("llama", decoder_arguments(config), training_defaults(config))


def llama_config(plan: ModelPlan) -> dict[str, Any]:
    """Return the ``config.json`` of a plan."""
    return decoder_config(plan, "llama", "LlamaForCausalLM")


_ONE = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_TWO = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}
_TINY = decoder_size(2, 64, 176, 4, 2, 256, rms_norm_eps=1e-6, max_position_embeddings=256)

LLAMA = Recipe(
    name="llama",
    summary="LLaMA: RMSNorm, rotary positions, SwiGLU",
    model_types=("llama",),
    plan=llama_plan,
    config=llama_config,
    rows=DECODER,
    sizes={
        "tiny": _TINY,
        "7b": decoder_size(32, 4096, 11008, 32, 32, 32000, **_ONE),
        "13b": decoder_size(40, 5120, 13824, 40, 40, 32000, **_ONE),
        "33b": decoder_size(60, 6656, 17920, 52, 52, 32000, **_ONE),
        "65b": decoder_size(80, 8192, 22016, 64, 64, 32000, **{**_ONE, "rms_norm_eps": 1e-5}),
    },
)
LLAMA2 = Recipe(
    name="llama2",
    summary="Llama 2, with query groups in its larger sizes",
    plan=llama_plan,
    config=llama_config,
    rows=DECODER,
    sizes={
        "tiny": _TINY,
        "7b": decoder_size(32, 4096, 11008, 32, 32, 32000, **_TWO),
        "13b": decoder_size(40, 5120, 13824, 40, 40, 32000, **_TWO),
        "34b": decoder_size(48, 8192, 22016, 64, 8, 32000, **_TWO),
        "70b": decoder_size(80, 8192, 28672, 64, 8, 32000, **_TWO),
    },
    chat_template="llama2",
)
RECIPES = (LLAMA, LLAMA2)
