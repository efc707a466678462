"""Settings of the device's caching allocator: expandable segments, set before the first allocation."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection

    from mindspeed_core.session import Session

VARIABLE = "MEMORY_FRAGMENTATION"
"""The environment variable that stands for the flag where it is 1."""
GROWING = "expandable_segments:True"
"""Segments of address space that grow as memory is needed, instead of blocks of fixed sizes."""
_FIXED = "expandable_segments:False"
_VARIABLES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    "npu": ("PYTORCH_NPU_ALLOC_CONF",),
}
"""Variables that the allocators read, by platform; the first is the one that is set."""
_MODULES = {"cuda": "torch.cuda", "npu": "torch_npu"}


def given(kinds: Collection[str], environment: Mapping[str, str]) -> str:
    """Return a setting of the user's, which stands; empty where there is none."""
    for kind in kinds:
        for name in _VARIABLES.get(kind, ()):
            if environment.get(name):
                return f"{name}={environment[name]}"
    return ""


def set_growing_segments(session: Session) -> None:
    """Let the allocator use growing segments, unless the user has set it up.

    The variable serves a device that is not in use yet. Where it is, as in a framework that opens a session
    later, the allocator is told directly, and told otherwise when the session closes.
    """
    platform = session.platform
    kinds = platform.kinds()
    if given(kinds, os.environ):
        return
    for kind in kinds & _VARIABLES.keys():
        session.setenv(_VARIABLES[kind][0], GROWING)
        if _in_use(kind):
            platform.allocator_settings(GROWING)
            session.at_close(lambda: platform.allocator_settings(_FIXED))


def _in_use(kind: str) -> bool:
    module: Any = sys.modules.get(_MODULES[kind])
    runtime = getattr(module, "npu", None) if kind == "npu" else module
    return runtime is not None and bool(runtime.is_initialized())
