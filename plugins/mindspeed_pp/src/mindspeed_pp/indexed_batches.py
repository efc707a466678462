"""Micro-batches of one step, in any order and more than once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class IndexedBatches:
    """An iterator over micro-batches that gives the one that is asked for, also again."""

    def __init__(self, batches: Iterator[Any]) -> None:
        """Wrap the chunk's iterator; ``at`` is the micro-batch that ``next`` returns."""
        self._batches = batches
        self._seen: list[Any] = []
        self.at = 0

    def __iter__(self) -> IndexedBatches:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return micro-batch ``at`` of the step."""
        return self.look(self.at)

    def look(self, at: int) -> Any:
        """Return a micro-batch of the step, reading as far as it takes."""
        while len(self._seen) <= at:
            self._seen.append(next(self._batches))
        return self._seen[at]

    def finish(self, count: int) -> None:
        """Read to the end of a step of ``count`` micro-batches, where any of it was read."""
        if self._seen:
            self.look(count - 1)
