"""The declaration of memory that is handed out without gaps."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, hookimpl
from mindspeed_memory.allocator_settings import GROWING, VARIABLE, given, set_growing_segments

_FLAG, _POOLS = "--memory-fragmentation", "--memory-fragmentation-pools"
_DEST = "memory_fragmentation_pools"


class MemoryFragmentation(Feature):
    """Settings of the device's allocator."""

    name = "memory-fragmentation"
    family = "memory"
    summary = "Reduce reserved but unused device memory with expandable segments"
    level = 0
    flags = (
        Flag(_FLAG, help="Use expandable segments of the device's allocator; also MEMORY_FRAGMENTATION=1."),
        Flag(
            _POOLS,
            help=(
                "Allocate parameters, gradients and optimizer state in a memory pool of their own instead."
            ),
        ),
    )
    conflicts = (Conflict(flag="--use-nccl-ub", reason="buffers of communication have a pool of their own"),)
    slots = ("allocator",)
    docs = "mindspeed_memory:docs/memory-fragmentation.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_memory.features.optimizer_proofs:FRAGMENTATION_PROOFS")

    _entered: Callable[[], AbstractContextManager[Any]] | None = None
    _updated = False

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a flag or the environment variable asks for it."""
        asked = getattr(args, "memory_fragmentation", False) or getattr(args, _DEST, False)
        return bool(asked) or os.environ.get(VARIABLE) == "1"

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse pools where the user asks for segments that grow."""
        found = given(("cuda", "npu"), os.environ)
        if getattr(args, _DEST, False) and GROWING in found:
            return (
                f"{_POOLS}: {found} lets segments grow, which pools of their own do not go with; unset the "
                "variable, or drop the flag",
            )
        return ()

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say which setting of the user's stands."""
        found = given(("cuda", "npu"), os.environ)
        return (f"{_FLAG}: {found} stands as you set it",) if found and GROWING not in found else ()

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Set the allocator up before there is memory of the device."""
        if not getattr(args, _DEST, False):
            set_growing_segments(session)
        return (yield)

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Keep parameters in the pool."""
        with self._pool(session, args):
            return (yield)

    @hookimpl(wrapper=True)
    def wrap_ddp(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Keep buffers of parameters and gradients in the pool."""
        with self._pool(session, args):
            return (yield)

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Keep main parameters in the pool."""
        with self._pool(session, args):
            return (yield)

    @hookimpl(wrapper=True)
    def optimizer_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Keep moments in the pool, which the first update makes."""
        if self._updated:
            return (yield)
        self._updated = True
        with self._pool(session, run.args):
            return (yield)

    def _pool(self, session: Any, args: Any) -> AbstractContextManager[Any]:
        if not getattr(args, _DEST, False):
            return nullcontext()
        if self._entered is None:
            self._entered = session.platform.memory_pool()
        return self._entered()
