"""Rules and rows of layers with routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_models.config_file import Keys
from mindspeed_models.recipes.decoder import HF_LAYER, LAYER, gated_mlp, routed
from mindspeed_models.weights.table import Row, When

GATED = ("gate_proj", "up_proj", "down_proj")


def expert_arguments(
    keys: Keys, *, ffn: str, normalized: bool, layers: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the flags of experts chosen by a softmax.

    Args:
        keys: of ``config.json``.
        ffn: key of the experts' intermediate size.
        normalized: whether the weights of chosen experts sum to one; then softmax comes after the choice.
        layers: for each layer whether it has experts; None for all.
    """
    count = keys.count("num_local_experts", "num_experts", "n_routed_experts")
    chosen = keys.count("num_experts_per_tok")
    if chosen > count:
        keys.refuse("num_experts_per_tok", f"of {count} experts")
    return {
        "num_experts": count,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": keys.count(ffn),
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": not normalized,
        "moe_layer_freq": 1 if layers is None or all(layers) else list(layers),
    }


def expert_defaults(keys: Keys) -> dict[str, Any]:
    """Return what the family trains with: its balancing loss."""
    return {
        "moe_router_load_balancing_type": ["aux_loss"],
        "moe_aux_loss_coeff": [float(keys.get("router_aux_loss_coef", "aux_loss_alpha", default=0.0))],
    }


def expert_rows(
    gate: str,
    experts: str,
    names: Sequence[str] = GATED,
    *,
    mc: str = LAYER,
    hf: str = HF_LAYER,
    when: When | None = routed,
) -> tuple[Row, ...]:
    """Return norm, router and experts of a layer.

    Args:
        gate: name of the router behind the prefix of a layer.
        experts: prefix of the experts, likewise.
        names: gate, up and down projection of an expert.
        mc: prefix of the layer in megatron-core.
        hf: prefix of the layer in the files.
        when: the layers that have experts.
    """
    norm = Row(
        mc + "pre_mlp_layernorm.weight",
        (hf + "post_attention_layernorm.weight",),
        when=when,
        # megatron-core's local layers rename it on saving.
        also=(mc + "mlp.linear_fc1.layer_norm_weight",),
    )
    router = Row(mc + "mlp.router.weight", (f"{hf}{gate}.weight",), when=when)
    inside = gated_mlp(mc + "mlp.experts.experts.{e}.", hf + experts + ".{e}.", names, when)
    return (norm, router, *inside)
