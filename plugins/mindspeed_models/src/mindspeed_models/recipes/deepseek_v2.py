"""DeepSeek-V2-Lite: multi-latent attention, shared and routed experts."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.experts import expert_defaults
from mindspeed_models.recipes.latent import (
    YARN,
    latent_arguments,
    latent_config,
    latent_defaults,
    latent_rows,
    latent_size,
)


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    if keys.get("topk_method", default="greedy") != "greedy":
        reason = "which takes the best of a group; megatron-core adds the best two, and would route otherwise"
        keys.refuse("topk_method", reason)
    keys.only("norm_topk_prob", False, reason="and megatron-core's softmax router over all experts has false")
    arguments = {
        **latent_arguments(keys),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    }
    return ModelPlan("deepseek-v2", arguments, {**latent_defaults(keys), **expert_defaults(keys)})


def _config(plan: ModelPlan) -> dict[str, Any]:
    found = latent_config(plan, "deepseek_v2", "DeepseekV2ForCausalLM")
    return {**found, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}


_LITE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_TINY = {"max_position_embeddings": 256}
DEEPSEEK_V2 = Recipe(
    name="deepseek-v2",
    summary="DeepSeek-V2-Lite: multi-latent attention, shared and routed experts",
    model_types=("deepseek_v2",),
    plan=_plan,
    config=_config,
    rows=latent_rows(bias=False),
    sizes={
        "tiny": latent_size((2, 64, 96, 4, 32, 256), (4, 2, 1, 1), (None, 16, 16, 8, 16), **_TINY),
        "lite": latent_size(
            (27, 2048, 10944, 16, 1408, 102400), (64, 6, 2, 1), (None, 512, 128, 64, 128), rope_scaling=_LITE
        ),
    },
    chat_template="deepseek",
)
RECIPES = (DEEPSEEK_V2,)
