"""Bytes of a step as a device's allocator counts them, without looking at operations.

`mindspeed_megatron.instruments.memory.TensorBytes` follows every operation with a dispatch mode, under which
``torch.compile`` runs functions eagerly: compiled dropout draws other numbers than eager dropout, and a step
that is followed would train something else. An allocator counts anyway.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Figures(Protocol):
    """The memory figures of a platform; each has ``bytes``."""

    def memory_allocated(self) -> Any:
        """Return what is allocated now."""

    def peak_memory(self) -> Any:
        """Return the most since the last reset."""

    def reset_peak_memory(self) -> None:
        """Begin a new peak."""


class AllocatorBytes:
    """Counts by the platform's own figures; the peak that it reports begins anew with each reset."""

    def __init__(self, platform: Figures) -> None:
        """Count from `__enter__` on.

        Args:
            platform: whose allocator counts exactly.
        """
        self._platform = platform
        self._start = 0

    @property
    def alive(self) -> int:
        """Return the bytes now, relative to the start."""
        return int(self._platform.memory_allocated().bytes) - self._start

    @property
    def peak(self) -> int:
        """Return the most bytes since the start or the last reset, relative to the start."""
        return int(self._platform.peak_memory().bytes) - self._start

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self._platform.reset_peak_memory()

    def paused(self) -> AbstractContextManager[Any]:
        """Leave out nothing: buffers of the host are none of the allocator's."""
        return nullcontext()

    def __enter__(self) -> AllocatorBytes:
        """Begin to count."""
        self._platform.reset_peak_memory()
        self._start = self._platform.memory_allocated().bytes
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop."""
