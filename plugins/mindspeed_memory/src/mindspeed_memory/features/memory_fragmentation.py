"""The declaration of memory that is handed out without gaps."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, hookimpl
from mindspeed_memory.allocator_settings import GROWING, VARIABLE, given, set_growing_segments
from mindspeed_memory.features.optimizer_proofs import FRAGMENTATION_PROOFS

_FLAG = "--memory-fragmentation"


class MemoryFragmentation(Feature):
    """Settings of the device's allocator."""

    name = "memory-fragmentation"
    family = "memory"
    summary = "Segments of the device's memory that grow, so that less of it is reserved and not used"
    level = 0
    flags = (
        Flag(_FLAG, help="Let the device's allocator use segments that grow; or MEMORY_FRAGMENTATION=1."),
    )
    slots = ("allocator",)
    docs = "mindspeed_memory:docs/memory-fragmentation.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = FRAGMENTATION_PROOFS

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the flag or the environment variable asks for it."""
        return bool(getattr(args, "memory_fragmentation", False)) or os.environ.get(VARIABLE) == "1"

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say which setting of the user's stands."""
        found = given(("cuda", "npu"), os.environ)
        return (f"{_FLAG}: {found} stands as you set it",) if found and GROWING not in found else ()

    @hookimpl(wrapper=True)
    def prepare_process(self, session: Any) -> Generator[None, Any, Any]:
        """Set the allocator up before there is memory of the device."""
        set_growing_segments(session)
        return (yield)
