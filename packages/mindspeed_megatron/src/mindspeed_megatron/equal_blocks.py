"""Loops over blocks in a dry run: blocks of one shape differ in their values alone, and there are none.

Kernels for CPUs work on few rows at a time, a thousand times for a long sequence, and use the same memory
again and again. In a dry run three blocks of each shape stand for all of them: bytes are what they are, since
the first two show what a block finds left over of the one before, and whoever counts operations multiplies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")

# Plain names: torch.compile traces code that asks for them, and stops at a context variable.
_dry = False
_times = 1


def run_blocks(blocks: Iterable[T], shape: Callable[[T], Hashable]) -> Iterable[T]:
    """Return the blocks to run: all of them, in a dry run three of each row of blocks of one shape.

    Args:
        blocks: whose results are written into memory that is there before, and of which nothing is kept.
        shape: everything that decides which operations a block takes, and on how many elements.
    """
    return _representatives(blocks, shape) if _dry else blocks


def times() -> int:
    """Return for how many blocks the one stands that runs."""
    return _times


def are_unknown() -> bool:
    """Return whether nothing is computed, so that tensors have no values to ask for."""
    return _dry


@contextmanager
def without_values() -> Iterator[None]:
    """Let blocks of one shape stand for each other inside the context: nothing is computed."""
    global _dry
    before, _dry = _dry, True
    try:
        yield
    finally:
        _dry = before


def _representatives(blocks: Iterable[T], shape: Callable[[T], Hashable]) -> Iterator[T]:
    global _times
    before = _times
    for _, alike in groupby(blocks, key=shape):
        found = list(alike)
        yield found[0]
        if len(found) > 2:
            _times = before * (len(found) - 2)
            try:
                yield found[1]
            finally:
                _times = before
        if len(found) > 1:
            yield found[-1]
