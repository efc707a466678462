"""DeepSeek-V3 and R1: a sigmoid router with biases, predictions further on."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import training_defaults
from mindspeed_models.recipes.latent import (
    YARN,
    latent_arguments,
    latent_config,
    latent_rows,
    latent_size,
)


def _plan(config: Config) -> ModelPlan:
    keys = Keys(config)
    keys.only("norm_topk_prob", True, reason="and megatron-core's sigmoid router normalizes")
    arguments = {
        **latent_arguments(keys),
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": keys.count("n_group"),
        "moe_router_group_topk": keys.count("topk_group"),
        "mtp_num_layers": keys.get("num_nextn_predict_layers") or None,
    }
    # Only sequences are balanced by a loss; experts by their bias.
    defaults = {
        **training_defaults(config),
        "moe_router_load_balancing_type": ["seq_aux_loss"],
        "moe_aux_loss_coeff": [1e-4],
        "moe_router_bias_update_rate": 1e-3,
    }
    return ModelPlan("deepseek-v3", arguments, defaults)


def _config(plan: ModelPlan) -> dict[str, Any]:
    args = plan.arguments
    return {
        **latent_config(plan, "deepseek_v3", "DeepseekV3ForCausalLM"),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": args["moe_router_num_groups"],
        "topk_group": args["moe_router_group_topk"],
        "num_nextn_predict_layers": plan.prediction_modules,
    }


_ROUTER = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
_TINY = {**_ROUTER, "n_group": 2, "topk_group": 1, "max_position_embeddings": 256}
_SCALING = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
_671B = {**_ROUTER, "num_nextn_predict_layers": 1, "rope_scaling": _SCALING}
DEEPSEEK_V3 = Recipe(
    name="deepseek-v3",
    summary="DeepSeek-V3 and R1: a sigmoid router with biases, one prediction further on",
    model_types=("deepseek_v3",),
    plan=_plan,
    config=_config,
    rows=latent_rows(bias=True),
    sizes={
        "tiny": latent_size((2, 64, 96, 4, 32, 256), (4, 2, 1, 1), (16, 16, 16, 8, 16), **_TINY),
        "671b": latent_size(
            (61, 7168, 18432, 128, 2048, 129280), (256, 8, 1, 3), (1536, 512, 128, 64, 128), **_671B
        ),
    },
    chat_template="deepseek",
)
RECIPES = (DEEPSEEK_V3,)
