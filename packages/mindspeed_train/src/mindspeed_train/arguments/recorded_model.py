"""Arguments that build the model which a checkpoint describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_megatron.config_flags import dest_of
from mindspeed_megatron.model_fields import ARGUMENTS, Verdict, is_known, verdict_of
from mindspeed_megatron.model_record import ModelRecord

_ALSO = ("bf16", "fp16", "max_position_embeddings", "vocab_size", "padded_vocab_size", "mtp_num_layers")
"""Fields that change no function of the weights, and yet are those of the model."""
_DERIVED = {
    *("gated_linear_unit", "activation_func", "share_embeddings_and_output_weights", "num_query_groups"),
    *("rotary_frequencies", "softmax_vocab_size", "is_hybrid_model", "moe_router_load_balancing_type"),
    *("heterogeneous_layers_config_encoded_json", "heterogeneous_block_specs", "per_block_parameters"),
}
"""Fields without an argument of their own: what follows from others, or stands for several."""
_GATES = {"silu": "swiglu", "quick_gelu": "quick_geglu", "squared_relu": "squared_relu"}
_FOREIGN = (
    "group_query_attention num_query_groups swiglu quick_geglu squared_relu "
    "untie_embeddings_and_output_weights use_rotary_position_embeddings"
).split()


def recorded_arguments(record: ModelRecord) -> dict[str, Any]:
    """Return the arguments of the model that a record describes, by name.

    What active features say of their model has flags of theirs and is not among them: loading compares it.
    """
    fields = record.fields
    values: dict[str, Any] = {
        dest_of(name): value for name, value in fields.items() if _is_of_model(name, fields)
    }
    for name in _GATES.values():
        values[name] = False
    gate = _GATES.get(str(fields.get("activation_func")))
    if gate is not None and (gate == "squared_relu" or fields.get("gated_linear_unit")):
        values[gate] = True
    groups = fields.get("num_query_groups")
    values["group_query_attention"] = groups is not None
    if groups is not None:
        values["num_query_groups"] = groups
    if "share_embeddings_and_output_weights" in fields:
        shared = bool(fields["share_embeddings_and_output_weights"])
        values["untie_embeddings_and_output_weights"] = not shared
    return values


def foreign_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of Megatron-LM's arguments, by name, that describe a model."""
    return {
        name: value
        for name, value in given.items()
        if (name in _FOREIGN or _is_of_model(name, given) or name in ("norm_epsilon", "num_experts"))
        and name not in ("vocab_size",)
        and _plain(value)
    }


def _is_of_model(name: str, fields: Mapping[str, Any]) -> bool:
    if name in _ALSO:
        return True
    if name in _DERIVED or name in ARGUMENTS or not is_known(name):
        return False
    return verdict_of(name, fields) is Verdict.FUNCTION


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
