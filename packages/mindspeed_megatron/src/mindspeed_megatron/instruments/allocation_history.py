"""History of the tensors of a process: every allocation and release with its Python stack.

A device's caching allocator keeps such a history itself. This one is for machines without, and is written in
the same form, which https://pytorch.org/memory_viz draws.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections import deque
from typing import Any

import torch

from mindspeed_megatron.instruments import memory
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_megatron.instruments.observer import Observer

_FRAMES = 32
_TORCH = os.path.dirname(torch.__file__)
_BETWEEN = (
    __file__,
    memory.__file__,
    weakref.__file__,
    os.path.join(_TORCH, "_compile.py"),
    os.path.join(_TORCH, "_dynamo", ""),
)
"""Code between an operator and the record of its allocation."""


class AllocationHistory(Observer, TensorBytes):
    """The last allocations and releases of storages, of operators called by this thread and its backward."""

    def __init__(self, entries: int) -> None:
        """Start with an empty history of at most ``entries`` events."""
        super().__init__()
        self.events: deque[dict[str, Any]] = deque(maxlen=entries)

    def snapshot(self) -> dict[str, Any]:
        """Return the history as ``torch.cuda.memory._snapshot`` does, without segments of an allocator."""
        return {"segments": [], "device_traces": [list(self.events)]}

    def _allocated(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> None:
        super()._allocated(storage, tensor)
        self._record("alloc", storage._cdata, storage.nbytes())

    def _freed(self, key: int) -> None:
        if not self._closed:
            self._record("free_completed", key, self._sizes[key])
        super()._freed(key)

    def _resized(self, storage: torch.UntypedStorage, amount: int) -> None:
        super()._resized(storage, amount)
        size = storage.nbytes()
        self._record("free_completed", storage._cdata, size - amount)
        self._record("alloc", storage._cdata, size)

    def _record(self, action: str, key: int, size: int) -> None:
        if size and not self._paused:
            self.events.append(
                {
                    "action": action,
                    "addr": key,
                    "size": size,
                    "stream": 0,
                    "time_us": time.time_ns() // 1000,
                    "frames": _stack(),
                }
            )


def _stack() -> list[dict[str, Any]]:
    """Return the frames of the code that allocates or releases, innermost first."""
    frames: list[dict[str, Any]] = []
    frame = sys._getframe(1)
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if frames or not code.co_filename.startswith(_BETWEEN):
            frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back  # type: ignore[assignment]
    return frames
