"""Qwen3-MoE of Alibaba: Qwen3 with routed experts."""

from __future__ import annotations

from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipe import Config, ModelPlan, Recipe
from mindspeed_models.recipes.decoder import (
    DECODER,
    QK_NORMS,
    decoder_arguments,
    decoder_config,
    decoder_size,
    training_defaults,
)
from mindspeed_models.recipes.experts import expert_arguments, expert_defaults, expert_rows
from mindspeed_models.recipes.qwen2 import no_window


def _plan(config: Config) -> ModelPlan:
    no_window(config)
    config = {"head_dim": 128, **config}
    keys = Keys(config)
    keys.only("attention_bias", False, reason="and published models of this family have no biases")
    every, dense = keys.count("decoder_sparse_step", default=1), set(keys.get("mlp_only_layers", default=()))
    total = keys.count("num_hidden_layers")
    layers = [int(layer not in dense and (layer + 1) % every == 0) for layer in range(total)]
    experts = expert_arguments(
        keys,
        ffn="moe_intermediate_size",
        normalized=bool(keys.get("norm_topk_prob", default=False)),
        layers=layers,
    )
    arguments = {**decoder_arguments(config), "qk_layernorm": True, **experts}
    return ModelPlan("qwen3-moe", arguments, {**training_defaults(config), **expert_defaults(keys)})


def _config(plan: ModelPlan) -> dict[str, Any]:
    return {
        **decoder_config(plan, "qwen3_moe", "Qwen3MoeForCausalLM"),
        "moe_intermediate_size": plan.arguments["moe_ffn_hidden_size"],
        "num_experts": plan.experts,
        "num_experts_per_tok": plan.arguments["moe_router_topk"],
        "norm_topk_prob": not plan.arguments["moe_router_pre_softmax"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(plan.layers) if not plan.routed(layer)],
        "use_sliding_window": False,
    }


def _size(*sizes: int, expert_ffn: int, **more: Any) -> Config:
    common = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960, "head_dim": 128}
    experts = {
        "moe_intermediate_size": expert_ffn,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }
    return {**decoder_size(*sizes), **common, **experts, **more}


_TINY = {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "max_position_embeddings": 256}
QWEN3_MOE = Recipe(
    name="qwen3-moe",
    summary="Qwen3 with routed experts (30B-A3B, 235B-A22B)",
    model_types=("qwen3_moe",),
    plan=_plan,
    config=_config,
    rows=(*DECODER, *QK_NORMS, *expert_rows("mlp.gate", "mlp.experts")),
    sizes={
        "tiny": _size(2, 64, 176, 4, 2, 256, expert_ffn=48, **_TINY),
        "30b-a3b": _size(48, 2048, 6144, 32, 4, 151936, expert_ffn=768),
        "235b-a22b": _size(94, 4096, 12288, 64, 4, 151936, expert_ffn=1536),
    },
    chat_template="chatml",
)
RECIPES = (QWEN3_MOE,)
