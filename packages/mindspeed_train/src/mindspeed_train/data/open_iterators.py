"""The data iterators of a session, which end with it.

An iterator has loading processes. Found by Python's collection of cycles, torch's loader has lost the queue
through which it would end them, and waits seconds for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any


class OpenIterators:
    """Iterators that may still load; whoever drops one ends it."""

    def __init__(self) -> None:
        """Begin with none."""
        self._iterators: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()

    def add(self, iterator: Generator[Any, None, None]) -> None:
        """Remember an iterator for as long as somebody holds it."""
        self._iterators.add(iterator)

    def end(self) -> None:
        """End the loading processes of all iterators."""
        for iterator in list(self._iterators):
            iterator.close()
