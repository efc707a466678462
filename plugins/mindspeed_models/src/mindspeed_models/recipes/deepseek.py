"""DeepSeek-V2-Lite, V2 and V3: multi-latent attention, shared and routed experts, predictions further on."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.experts import expert_defaults
from mindspeed_models.recipes.latent import latent_arguments, latent_config, latent_rows


def _v2(config: Config) -> ModelPlan:
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
    return ModelPlan("deepseek-v2", arguments, expert_defaults(keys))


def _v3(config: Config) -> ModelPlan:
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
    defaults = {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [1e-4]}
    return ModelPlan("deepseek-v3", arguments, {**defaults, "moe_router_bias_update_rate": 1e-3})


def _v2_config(plan: ModelPlan) -> dict[str, Any]:
    found = latent_config(plan, "deepseek_v2", "DeepseekV2ForCausalLM")
    return {**found, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False}


def _v3_config(plan: ModelPlan) -> dict[str, Any]:
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


_NAMES = "num_hidden_layers hidden_size intermediate_size num_attention_heads moe_intermediate_size vocab_size".split()
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}


def _size(
    *sizes: int,
    experts: tuple[int, int, int, int],
    latent: tuple[int | None, int, int, int, int],
    **more: Any,
) -> Config:
    routed = dict(
        zip(("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace"), experts)
    )
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    common = {"rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "rope_theta": 10000}
    return {**dict(zip(_NAMES, sizes)), **routed, **dict(zip(names, latent)), **common, **more}


_TINY = (2, 64, 96, 4, 32, 256)
_LITE = {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}
_V3_MORE = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
DEEPSEEK_V2 = Recipe(
    name="deepseek-v2",
    summary="DeepSeek-V2-Lite: multi-latent attention, shared and routed experts",
    model_types=("deepseek_v2",),
    plan=_v2,
    config=_v2_config,
    rows=latent_rows(bias=False),
    sizes={
        "tiny": _size(
            *_TINY, experts=(4, 2, 1, 1), latent=(None, 16, 16, 8, 16), max_position_embeddings=256
        ),
        "lite": _size(
            27,
            2048,
            10944,
            16,
            1408,
            102400,
            experts=(64, 6, 2, 1),
            latent=(None, 512, 128, 64, 128),
            rope_scaling=_LITE,
        ),
    },
    chat_template="deepseek",
)
DEEPSEEK_V3 = Recipe(
    name="deepseek-v3",
    summary="DeepSeek-V3 and R1: a sigmoid router with biases, one prediction further on",
    model_types=("deepseek_v3",),
    plan=_v3,
    config=_v3_config,
    rows=latent_rows(bias=True),
    sizes={
        "tiny": _size(
            *_TINY,
            experts=(4, 2, 1, 1),
            latent=(16, 16, 16, 8, 16),
            **{**_V3_MORE, "n_group": 2, "topk_group": 1},
            max_position_embeddings=256,
        ),
        "671b": _size(
            61,
            7168,
            18432,
            128,
            2048,
            129280,
            experts=(256, 8, 1, 3),
            latent=(1536, 512, 128, 64, 128),
            **_V3_MORE,
            num_nextn_predict_layers=1,
            rope_scaling={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
    },
    chat_template="deepseek",
)
RECIPES = (DEEPSEEK_V2, DEEPSEEK_V3)
