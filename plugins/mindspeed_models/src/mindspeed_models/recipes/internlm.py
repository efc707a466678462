"""InternLM of Shanghai AI Laboratory: LLaMA's layers with biases in attention."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    HF_LAYER,
    LAYER,
    decoder_arguments,
    decoder_config,
    decoder_size,
    joined,
    training_defaults,
)
from mindspeed_models.weights.table import Row


def _plan(config: Config) -> ModelPlan:
    Keys(config).only("bias", True, reason="and models of this family have biases of q, k, v and o")
    arguments = {**decoder_arguments(config), "add_qkv_bias": True, "row_col_parallel_linear_bias": True}
    return ModelPlan("internlm", arguments, training_defaults(config))


def _config(plan: ModelPlan) -> dict[str, Any]:
    return {**decoder_config(plan, "internlm", "InternLMForCausalLM"), "bias": True}


_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
INTERNLM = Recipe(
    name="internlm",
    summary="InternLM: LLaMA with biases of query, key, value and output",
    model_types=("internlm",),
    plan=_plan,
    config=_config,
    rows=(
        *DECODER,
        joined("bias"),
        Row(LAYER + "self_attention.linear_proj.bias", (HF_LAYER + "self_attn.o_proj.bias",)),
    ),
    sizes={
        "tiny": decoder_size(2, 64, 176, 4, 4, 256, **_COMMON),
        "7b": decoder_size(32, 4096, 11008, 32, 32, 103168, **_COMMON),
        "65b": decoder_size(80, 8192, 22016, 64, 64, 103168, **_COMMON),
    },
    chat_template="internlm",
)
RECIPES = (INTERNLM,)
