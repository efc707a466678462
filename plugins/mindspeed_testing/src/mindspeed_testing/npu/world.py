"""A world of any size in which this process is alone.

Collectives reach nobody and change nothing, questions to other ranks are answered as if they said what this
one says, and every group has the name of a communicator, as operators with built-in communication ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patches import PatchLedger


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """Start ``torch.distributed`` as one rank of a world that does not exist; yield its group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ledger = PatchLedger()
    ledger.apply(_ALONE, owner="fake world")
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        with mock.patch.object(dist.ProcessGroup, "_get_backend", _named_backend):
            yield dist.group.WORLD  # type: ignore[misc]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        ledger.revert()


class _Named:
    """The part of a group's backend that operators with built-in communication use."""

    def __init__(self, group: str) -> None:
        self._group = group

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """Return the communicator's name."""
        return f"fake-{self._group}"


def _named_backend(group: dist.ProcessGroup, device: Any) -> _Named:
    return _Named(group.group_name)


def fake_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for ``new_group``: with any backend, the other ranks do not exist."""

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return original(ranks, timeout=timeout, backend="fake", **options)

    return new_group


def same_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for ``all_gather_object``: every rank contributes this rank's object."""

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    return all_gather_object


def said_here(original: Callable[..., Any]) -> Callable[..., Any]:
    """Stand in for ``broadcast_object_list``: the objects stay this rank's."""

    def broadcast_object_list(object_list: list[Any], *args: Any, **options: Any) -> None:
        return None

    return broadcast_object_list


_ALONE = tuple(
    Patch(
        target=f"torch.distributed.distributed_c10d:{name}",
        new=new,
        kind="wrap",
        reason="the other ranks of the world do not exist",
    )
    for name, new in (
        ("new_group", fake_group),
        ("all_gather_object", same_everywhere),
        ("broadcast_object_list", said_here),
    )
)
