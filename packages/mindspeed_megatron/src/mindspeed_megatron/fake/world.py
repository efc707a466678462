"""Process groups without peers: collectives reach nobody, other ranks are taken to say what this one says.

Each function takes an original of ``torch.distributed`` and returns its replacement; `world_patches` puts
them in place while a session is open. Groups of any backend become fake ones, so that a launch keeps its
flags and no socket is opened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspeed_core.feature import Patch
from mindspeed_core.platforms.platform import Position

Function = Callable[..., Any]


def started_at(position: Position) -> Callable[[Function], Function]:
    """Return a wrapper of ``init_process_group``: with any backend and store, the world is this one."""

    def start_world(original: Function) -> Function:
        @functools.wraps(original)
        def init_process_group(backend: Any = None, *args: Any, **options: Any) -> None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            original("fake", store=FakeStore(), rank=position.rank, world_size=position.world_size)

        return init_process_group

    return start_world


def fake_group(original: Function) -> Function:
    """Wrap ``new_group``: with any backend, the other ranks do not exist."""

    @functools.wraps(original)
    def new_group(
        ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **options: Any
    ) -> Any:
        return original(ranks, timeout=timeout, backend="fake", **options)

    return new_group


def same_everywhere(original: Function) -> Function:
    """Wrap ``all_gather_object``: every rank contributes this rank's object."""

    @functools.wraps(original)
    def all_gather_object(object_list: list[Any], obj: Any, *args: Any, **options: Any) -> None:
        object_list[:] = [obj] * len(object_list)

    return all_gather_object


def gathered_here(original: Function) -> Function:
    """Wrap ``gather_object``: every rank contributes this rank's object, where this rank gathers."""

    @functools.wraps(original)
    def gather_object(
        obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **options: Any
    ) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    return gather_object


def said_here(original: Function) -> Function:
    """Wrap ``broadcast_object_list``: the objects stay this rank's."""

    @functools.wraps(original)
    def broadcast_object_list(object_list: list[Any], *args: Any, **options: Any) -> None:
        return None

    return broadcast_object_list


def scattered_here(original: Function) -> Function:
    """Wrap ``scatter_object_list``: this rank gets the first object that it would send."""

    @functools.wraps(original)
    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        scatter_object_output_list[0] = (scatter_object_input_list or [None])[0]

    return scatter_object_list


class Transfer:
    """A send or receive that keeps its tensor as long as somebody keeps it, as gloo's do."""

    def __init__(self, work: Any, tensor: Any) -> None:
        """Go with the backend's ``work``."""
        self.work, self._tensor = work, tensor

    def __getattr__(self, name: str) -> Any:
        """Answer as the work does."""
        return getattr(self.work, name)


def keeping_its_tensor(original: Function) -> Function:
    """Wrap ``isend`` or ``irecv``: there is no peer, and the tensor takes its memory nevertheless."""

    @functools.wraps(original)
    def transfer(tensor: Any, *args: Any, **options: Any) -> Any:
        work = original(tensor, *args, **options)
        return None if work is None else Transfer(work, tensor)

    return transfer


_WRAPPERS: dict[str, Callable[[Function], Function]] = {
    "new_group": fake_group,
    "all_gather_object": same_everywhere,
    "gather_object": gathered_here,
    "broadcast_object_list": said_here,
    "scatter_object_list": scattered_here,
    "isend": keeping_its_tensor,
    "irecv": keeping_its_tensor,
}


def world_patches(position: Position) -> tuple[Patch, ...]:
    """Return the patches under which this process is one rank of a world without the others."""
    return tuple(
        Patch(
            target=f"torch.distributed.distributed_c10d:{name}",
            new=wrapper,
            kind="wrap",
            reason="the other ranks of the world do not exist",
            # torch_npu's transfer of cuda names wraps what this package holds, and goes past a patch of the
            # module that defines it.
            also=(f"torch.distributed:{name}",),
        )
        for name, wrapper in {"init_process_group": started_at(position), **_WRAPPERS}.items()
    )
