"""Process groups as operators take them: the group, its name, or the name of its communicator on NPUs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import ContractError


def process_group(group: ProcessGroup | str | None, argument: str) -> ProcessGroup:
    """Return the group of a name or an HCCL communicator, for None all ranks; errors name ``argument``.

    Raises:
        ContractError: there is no such group.
    """
    if isinstance(group, ProcessGroup):
        return group
    if not dist.is_initialized():
        raise ContractError(f"{argument}: there are no process groups yet; call init_process_group first")
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    known = list(dist.distributed_c10d._world.pg_map)
    for candidate in known:
        if group in (candidate.group_name, _communicator(candidate, create=False)):
            return candidate
    names = ", ".join(candidate.group_name for candidate in known)
    raise ContractError(f"{argument}: no process group is called {group!r}; there are {names}")


def hccl_name(group: ProcessGroup) -> str:
    """Name of a group's communicator, as torch_npu's operators with built-in communication take it."""
    name = _communicator(group, create=True)
    if not name:
        raise ContractError(
            f"group {group.group_name} has no HCCL communicator; its backend is {group.name()}"
        )
    return name


def _communicator(group: ProcessGroup, *, create: bool) -> str | None:
    """Return the name of a group's communicator; without ``create`` empty before its first collective.

    Creating one is collective: a group that is only looked at must not have it created.
    """
    if not hasattr(torch, "npu"):
        return None
    try:
        backend = group._get_backend(torch.device("npu"))
    except RuntimeError:
        return None
    name: str = backend.get_hccl_comm_name(dist.get_rank(), init_comm=create)  # type: ignore[attr-defined]
    return name
