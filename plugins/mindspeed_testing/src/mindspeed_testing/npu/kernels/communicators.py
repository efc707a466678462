"""Communicators of kernels with built-in communication: how they find their group and talk in it.

What a kernel exchanges inside of itself is no call of the code under test. It goes to the group's own
methods, past the functions of ``torch.distributed`` at which instruments count and contracts are held: sums
are made in float64 here, which no device's backend would take.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

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


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Add a tensor up over the ranks of a group, in place."""
    group.allreduce([tensor]).wait()


def gather_from_ranks(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks of a group, which have one shape."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    group.allgather([found], [tensor]).wait()
    return found
