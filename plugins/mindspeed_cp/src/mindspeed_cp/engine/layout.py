"""The tokens of a sequence that each rank owns, and their order: pure index arithmetic.

A rank's share is a list of half-open intervals of global positions; its local sequence is their
concatenation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

Interval = tuple[int, int]
"""Half-open range of global positions."""
Chunks = tuple[tuple[int, Interval], ...]
"""Intervals of global positions, each with the local row at which it starts."""


@dataclass(frozen=True)
class Layout:
    """The shares of all ranks.

    Attributes:
        shares: for every rank its intervals, in local order; together they cover every position once.
    """

    shares: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        covered = sorted(interval for share in self.shares for interval in share)
        position = 0
        for start, end in covered:
            if start != position or end < start:
                raise ValueError(f"the shares do not cover every position once: {covered}")
            position = end

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return len(self.shares)

    @cached_property
    def length(self) -> int:
        """Return the number of positions of the whole sequence."""
        return sum(end - start for share in self.shares for start, end in share)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of positions of each rank."""
        return tuple(sum(end - start for start, end in share) for share in self.shares)

    def positions(self, rank: int) -> npt.NDArray[np.int64]:
        """Return the global positions of a rank's local sequence, in order."""
        parts = [np.arange(start, end, dtype=np.int64) for start, end in self.shares[rank]]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    @cached_property
    def order(self) -> npt.NDArray[np.int64]:
        """Return the global positions of all ranks' local sequences behind one another: a permutation."""
        return np.concatenate([self.positions(rank) for rank in range(self.ranks)])

    def chunks(self, rank: int) -> Chunks:
        """Return a rank's intervals with the local index at which each starts."""
        return numbered(self.shares[rank])


def cut(length: int, parts: int) -> list[Interval]:
    """Cut a length into ``parts`` consecutive intervals of nearly equal size, the longer ones first."""
    base, longer = divmod(length, parts)
    found, start = [], 0
    for part in range(parts):
        end = start + base + (part < longer)
        found.append((start, end))
        start = end
    return found


def contiguous(length: int, ranks: int) -> Layout:
    """Return the layout of equal consecutive parts, the longer ones first."""
    return Layout(tuple((interval,) for interval in cut(length, ranks)))


def zigzag(length: int, ranks: int) -> Layout:
    """Return ``2 * ranks`` parts; rank ``r`` owns ``r`` and ``2 * ranks - 1 - r``: equal causal work."""
    parts = cut(length, 2 * ranks)
    return Layout(tuple((parts[rank], parts[2 * ranks - 1 - rank]) for rank in range(ranks)))


def documents_zigzag(ends: Sequence[int], ranks: int) -> Layout:
    """Return `zigzag` inside every document; ``ends`` are the running ends of the documents."""
    shares: list[list[Interval]] = [[] for _ in range(ranks)]
    start = 0
    for end in ends:
        inside = zigzag(end - start, ranks)
        for rank, share in enumerate(inside.shares):
            shares[rank] += [(start + low, start + high) for low, high in share]
        start = end
    return Layout(tuple(map(tuple, shares)))


def assign(weights: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal out chunks, the same number to each rank: heaviest first to the rank with the least work.

    Args:
        weights: work of each chunk; their number is a multiple of ``ranks``.
        ranks: number of ranks.
    """
    room, rest = divmod(len(weights), ranks)
    if rest:
        raise ValueError(f"{len(weights)} chunks are no multiple of {ranks} ranks")
    owned: list[list[int]] = [[] for _ in range(ranks)]
    least = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(weights)), key=lambda chunk: (-weights[chunk], chunk)):
        load, rank = heappop(least)
        owned[rank].append(index)
        if len(owned[rank]) < room:
            heappush(least, (load + weights[index], rank))
    return owned


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same positions as disjoint rising intervals that do not touch."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def numbered(intervals: Iterable[Interval]) -> Chunks:
    """Return intervals, each with the local row at which it starts when they lie behind one another."""
    found, local = [], 0
    for start, end in intervals:
        found.append((local, (start, end)))
        local += end - start
    return tuple(found)


def nested(outer: Layout, inner: int) -> Layout:
    """Cut each share of ``outer`` into ``inner`` pieces: rank ``r * inner + i`` owns piece ``i``.

    The ranks of one share gather it again by an exchange among neighbours.
    """
    shares: list[tuple[Interval, ...]] = []
    for rank in range(outer.ranks):
        for low, high in cut(outer.lengths[rank], inner):
            shares.append(
                tuple(
                    (start + max(low - local, 0), start + min(high - local, end - start))
                    for local, (start, end) in outer.chunks(rank)
                    if max(low - local, 0) < min(high - local, end - start)
                )
            )
    return Layout(tuple(shares))
