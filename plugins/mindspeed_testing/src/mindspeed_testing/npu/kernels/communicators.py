"""Names of communicators, by which kernels with built-in communication find their group."""

from __future__ import annotations

import torch.distributed as dist

_PREFIX = "communicator-"
_OF_DRY_RUNS = "fake-"


def communicator_name(group: dist.ProcessGroup) -> str:
    """Return the name of a group's communicator."""
    return f"{_PREFIX}{group.group_name}"


def group_of(communicator: str) -> dist.ProcessGroup:
    """Return the group of a communicator.

    Raises:
        LookupError: no group of this process has it.
    """
    for group in dist.distributed_c10d._world.pg_map:
        if communicator in (communicator_name(group), f"{_OF_DRY_RUNS}{group.group_name}"):
            return group
    raise LookupError(f"no communicator {communicator!r}; was it created by its first collective?")
