"""Allocations and releases of a rank in order, for the estimate of an allocator."""

from __future__ import annotations

from types import TracebackType
from typing import Any


class AllocationEvents:
    """Notes what a storage tracker sees while the context is open, after what is alive already.

    Attributes:
        events: pairs of a storage's number and its bytes; 0 bytes releases it.
        peak: most bytes alive.
    """

    def __init__(self, storage: Any) -> None:
        """Follow a `mindspeed_core.instruments.storage.StorageTracker`."""
        self.storage = storage
        self.events: list[tuple[int, int]] = []
        self.peak = 0
        self._alive = 0
        self._numbers: dict[int, tuple[int, int]] = {}
        self._count = 0

    def __enter__(self) -> AllocationEvents:
        """Begin with everything that is alive, largest first, as a build leaves it."""
        for key, size in sorted(self.storage._sizes.items(), key=lambda item: -item[1]):
            self._taken(key, size)
        hold, release = self.storage._hold, self.storage._release

        def held(key: int, one: Any) -> None:
            hold(key, one)
            if one.device == self.storage._device_type:
                self._taken(key, one.bytes)

        def released(key: int) -> Any:
            self._given_back(key)
            return release(key)

        self.storage._hold, self.storage._release = held, released
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Note no more."""
        del self.storage._hold, self.storage._release

    def _taken(self, key: int, size: int) -> None:
        if not size:
            return
        self._count += 1
        self._numbers[key] = (self._count, size)
        self.events.append((self._count, size))
        self._alive += size
        self.peak = max(self.peak, self._alive)

    def _given_back(self, key: int) -> None:
        number, size = self._numbers.pop(key, (0, 0))
        if number:
            self.events.append((number, 0))
            self._alive -= size
