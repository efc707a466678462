"""Allocations and releases of a rank in order, for the estimate of an allocator."""

from __future__ import annotations


class AllocationEvents:
    """Notes what a `mindspeed_megatron.instruments.storage.StorageTracker` tells its watcher.

    Attributes:
        events: pairs of a storage's number and its bytes; 0 bytes releases it.
        peak: most bytes alive.
    """

    def __init__(self) -> None:
        """Start with nothing alive."""
        self.events: list[tuple[int, int]] = []
        self.peak = 0
        self._alive = 0
        self._numbers: dict[int, tuple[int, int]] = {}
        self._count = 0

    def taken(self, key: int, size: int) -> None:
        """Note an allocation of ``size`` bytes; empty ones take nothing."""
        if not size:
            return
        self._count += 1
        self._numbers[key] = (self._count, size)
        self.events.append((self._count, size))
        self._alive += size
        self.peak = max(self.peak, self._alive)

    def released(self, key: int) -> None:
        """Note the release of what was noted."""
        number, size = self._numbers.pop(key, (0, 0))
        if number:
            self.events.append((number, 0))
            self._alive -= size
