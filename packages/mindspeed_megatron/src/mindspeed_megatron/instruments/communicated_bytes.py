"""Bytes that a rank sends in a call of ``torch.distributed``, by operation and size of the group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mindspeed_megatron.backend_contracts.rendezvous import MESSAGES


def sizes(tensors: Any) -> list[int]:
    """Return the bytes of each tensor of an input: one, several, or None."""
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors or []
    return [tensor.numel() * tensor.element_size() for tensor in listed]


def _sent_all_to_all(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return n - sizes(given["input_tensor_list"])[me]


def _sent_all_to_all_single(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    splits = given.get("input_split_sizes")
    if splits is None or len(splits) == 0:
        return _others_share(n, p, me, given)
    length = given["input"].shape[0]
    row = n // length if length else 0
    return row * (sum(map(int, splits)) - int(splits[me]))


def _others_share(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return (p - 1) / p * n


def whole(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    """Return the bytes of the input: all of them are sent, once."""
    return n


def _to_every_other(n: int, p: int, me: int, given: Mapping[str, Any]) -> float:
    return (p - 1) * n


MEASURES: dict[str, tuple[str, Callable[[int, int, int, Mapping[str, Any]], float]]] = {
    "all_reduce": ("tensor", lambda n, p, *_: 2 * (p - 1) / p * n),
    "all_gather": ("tensor", _to_every_other),
    "all_gather_into_tensor": ("input_tensor", _to_every_other),
    "reduce_scatter": ("input_list", _others_share),
    "reduce_scatter_tensor": ("input", _others_share),
    "all_to_all": ("input_tensor_list", _sent_all_to_all),
    "all_to_all_single": ("input", _sent_all_to_all_single),
    # A pipelined ring: every rank but the last one forwards the tensor once.
    "broadcast": ("tensor", _others_share),
    "reduce": ("tensor", _others_share),
    "gather": ("tensor", lambda n, p, me, given: 0 if given.get("gather_list") else n),
    "scatter": ("scatter_list", _others_share),
    "send": ("tensor", whole),
    "isend": ("tensor", whole),
    "recv": ("", whole),
    "irecv": ("", whole),
    "barrier": ("", whole),
}
"""Each counted function: its input argument, and the bytes sent by input bytes, group size, own position and
arguments."""

SAME_OPERATION = {
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
}
"""Later names of counted functions, recorded under the name that every supported torch has."""

OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
"""Collectives of Python objects, whose bytes only the ranks know that pickle them."""

COLLECTIVES = frozenset(MEASURES) - MESSAGES - {"barrier"}
"""Operations in which a whole group takes part and data moves."""
