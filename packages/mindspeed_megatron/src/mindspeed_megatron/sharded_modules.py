"""Sharded state of a module whose parameters are cut over tensor-parallel ranks, for every megatron-core."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


def sharded_tensors(
    state: Mapping[str, Tensor],
    prefix: str,
    axes: Mapping[str, int],
    offsets: tuple[Any, ...] = (),
    *,
    tp_group: Any,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the sharded state of a module's own tensors; empty where it has none.

    Args:
        state: tensors by their name in the module.
        prefix: of the module, with its dot.
        axes: the axis along which a tensor is cut, by name; the others are whole on every rank.
        offsets: of what surrounds the module.
        tp_group: the ranks that hold the parts; megatron-core before 0.16 takes its own group.
        metadata: of the checkpoint, as megatron-core hands it to ``sharded_state_dict``.
    """
    if not state:
        return {}
    groups = {"tp_group": tp_group}
    if metadata and "dp_cp_group" in metadata:
        groups["dp_cp_group"] = metadata["dp_cp_group"]
    known = inspect.signature(make_sharded_tensors_for_checkpoint).parameters
    taken = {name: group for name, group in groups.items() if name in known}
    found: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        dict(state), prefix, dict(axes), offsets, **taken
    )
    return found
