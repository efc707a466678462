"""Aquila of BAAI and InternLM of Shanghai AI Laboratory: LLaMA's layers, the latter with biases in attention."""

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
    joined,
    training_defaults,
)
from mindspeed_models.weights.table import Row


def _aquila(config: Config) -> ModelPlan:
    return ModelPlan(
        "aquila", decoder_arguments(config), {**training_defaults(config), "init_method_std": 0.01}
    )


def _internlm(config: Config) -> ModelPlan:
    Keys(config).only("bias", True, reason="and models of this family have biases of q, k, v and o")
    arguments = {**decoder_arguments(config), "add_qkv_bias": True, "row_col_parallel_linear_bias": True}
    return ModelPlan("internlm", arguments, training_defaults(config))


def _aquila_config(plan: ModelPlan) -> dict[str, Any]:
    return decoder_config(plan, "aquila", "AquilaForCausalLM")


def _internlm_config(plan: ModelPlan) -> dict[str, Any]:
    return {**decoder_config(plan, "internlm", "InternLMForCausalLM"), "bias": True}


def _size(layers: int, hidden: int, ffn: int, heads: int, vocab: int, **more: Any) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        **more,
    }


AQUILA = Recipe(
    name="aquila",
    summary="Aquila: LLaMA's layers, initialized with a smaller deviation",
    model_types=("aquila",),
    plan=_aquila,
    config=_aquila_config,
    rows=DECODER,
    sizes={"tiny": _size(2, 64, 176, 4, 256), "7b": _size(32, 4096, 11008, 32, 100008)},
    chat_template="aquila",
)
INTERNLM = Recipe(
    name="internlm",
    summary="InternLM: LLaMA with biases of query, key, value and output",
    model_types=("internlm",),
    plan=_internlm,
    config=_internlm_config,
    rows=(
        *DECODER,
        joined("bias"),
        Row(LAYER + "self_attention.linear_proj.bias", (HF_LAYER + "self_attn.o_proj.bias",)),
    ),
    sizes={
        "tiny": _size(2, 64, 176, 4, 256),
        "7b": _size(32, 4096, 11008, 32, 103168),
        "65b": _size(80, 8192, 22016, 64, 103168),
    },
    chat_template="internlm",
)
RECIPES = (AQUILA, INTERNLM)
