"""DeepSeek-V2 and V2-Lite: multi-latent attention, shared and routed experts."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import training_defaults
from mindspeed_models.recipes.experts import expert_defaults
from mindspeed_models.recipes.latent import (
    YARN,
    latent_arguments,
    latent_config,
    latent_rows,
    latent_size,
)

_GREEDY, _GROUPS = "greedy", "group_limited_greedy"


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    keys.only("topk_method", _GREEDY, _GROUPS, reason="and models of this type have greedy or " + _GROUPS)
    keys.only("norm_topk_prob", False, reason="and megatron-core's softmax router over all experts has false")
    arguments = {
        **latent_arguments(keys),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": True,
    }
    if keys.get("topk_method") == _GROUPS:
        arguments |= _groups(keys, arguments["num_experts"], arguments["moe_router_topk"])
    return ModelPlan("deepseek-v2", arguments, {**training_defaults(config), **expert_defaults(keys)})


def _groups(keys: Keys, experts: int, chosen: int) -> dict[str, Any]:
    """Return the flags of a choice in a part of the groups of experts alone, those with the best experts."""
    groups, kept = keys.count("n_group"), keys.count("topk_group")
    if experts % groups:
        keys.refuse("n_group", f"which does not divide the {experts} experts")
    if kept > groups or chosen > kept * (experts // groups):
        keys.refuse("topk_group", f"of {groups} groups, in which {chosen} of {experts} experts are chosen")
    return {
        "moe_router_num_groups": groups,
        "moe_router_group_topk": kept,
        "moe_router_best_of_group": True,
    }


def _config(plan: ModelPlan) -> dict[str, Any]:
    found = latent_config(plan, "deepseek_v2", "DeepseekV2ForCausalLM")
    found |= {"topk_method": _GREEDY, "scoring_func": "softmax", "norm_topk_prob": False}
    if plan.value("moe_router_best_of_group", False):
        groups, kept = (plan.arguments[f"moe_router_{name}"] for name in ("num_groups", "group_topk"))
        found |= {"topk_method": _GROUPS, "n_group": groups, "topk_group": kept}
    return found


_LITE = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_TINY = {"max_position_embeddings": 256}
_LIMITED = {"topk_method": _GROUPS, "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
DEEPSEEK_V2 = Recipe(
    name="deepseek-v2",
    summary="DeepSeek-V2 and V2-Lite: multi-latent attention, shared and routed experts",
    model_types=("deepseek_v2",),
    plan=_plan,
    config=_config,
    rows=latent_rows(bias=False),
    sizes={
        "tiny": latent_size((2, 64, 96, 4, 32, 256), (4, 2, 1, 1), (None, 16, 16, 8, 16), **_TINY),
        "lite": latent_size(
            (27, 2048, 10944, 16, 1408, 102400), (64, 6, 2, 1), (None, 512, 128, 64, 128), rope_scaling=_LITE
        ),
        "236b": latent_size(
            (60, 5120, 12288, 128, 1536, 102400),
            (160, 6, 2, 1),
            (1536, 512, 128, 64, 128),
            rope_scaling=_LITE,
            **_LIMITED,
        ),
    },
    chat_template="deepseek",
)
RECIPES = (DEEPSEEK_V2,)
