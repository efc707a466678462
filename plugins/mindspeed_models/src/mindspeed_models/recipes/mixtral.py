"""Mixtral of Mistral AI: Mistral with routed experts."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import DECODER, decoder_config, training_defaults
from mindspeed_models.recipes.experts import expert_arguments, expert_defaults, expert_rows
from mindspeed_models.recipes.mistral import mistral_arguments, mistral_size


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    experts = expert_arguments(keys, ffn="intermediate_size", normalized=True)
    defaults = {**training_defaults(config), **expert_defaults(keys)}
    return ModelPlan("mixtral", {**mistral_arguments(config), **experts}, defaults)


def _config(plan: ModelPlan) -> dict[str, Any]:
    window = plan.value("window_size")
    return {
        **decoder_config(plan, "mixtral", "MixtralForCausalLM"),
        "intermediate_size": plan.arguments["moe_ffn_hidden_size"],
        "num_local_experts": plan.experts,
        "num_experts_per_tok": plan.arguments["moe_router_topk"],
        "sliding_window": None if window is None else window[0] + 1,
    }


MIXTRAL = Recipe(
    name="mixtral",
    summary="Mixtral: Mistral with eight experts, of which two see a token",
    model_types=("mixtral",),
    plan=_plan,
    config=_config,
    rows=(*DECODER, *expert_rows("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"))),
    sizes={
        "tiny": mistral_size(2, 64, 96, 4, 2, 256, longest=256, num_local_experts=4, num_experts_per_tok=2),
        "8x7b": mistral_size(32, 4096, 14336, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        "8x22b": mistral_size(
            56, 6144, 16384, 48, 8, 32768, num_local_experts=8, num_experts_per_tok=2, longest=65536
        ),
    },
    chat_template="mistral",
)
RECIPES = (MIXTRAL,)
