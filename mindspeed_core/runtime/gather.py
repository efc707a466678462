"""Values of all ranks, gathered as Python objects."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def all_gather_values(value: T, group: Any = None) -> list[T]:
    """Return every rank's (picklable) value, in rank order. Collective; one value without a process group.

    Every rank of the group has to call it: one that does not leaves the others waiting.

    Args:
        value: the value of this rank.
        group: the ranks that take part; all by default.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) <= 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
