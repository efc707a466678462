"""The source of every position's successor, in any layout: pure index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mindspeed_cp.engine.layout import Layout


@dataclass(frozen=True)
class ShiftPlan:
    """The sources of a rank's values when everything moves one position forward.

    Attributes:
        first: local rows at which the rank's shares begin.
        last: local rows at which they end.
        sources: for each of ``last``, the number of the share that continues it, counting every rank's shares
            behind one another with ``most`` for each; -1 at the end of the sequence.
        most: the largest number of shares of a rank.
        origin: the number of the share that begins the sequence.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    sources: tuple[int, ...]
    most: int
    origin: int


@lru_cache(maxsize=64)
def shift_plan(layout: Layout, rank: int) -> ShiftPlan:
    """Return the plan of one rank."""
    shares = [[part for part in layout.chunks(r) if part[1][0] < part[1][1]] for r in range(layout.ranks)]
    most = max(map(len, shares))
    begins = {start: r * most + i for r in range(layout.ranks) for i, (_, (start, _)) in enumerate(shares[r])}
    own = shares[rank]
    return ShiftPlan(
        first=tuple(row for row, _ in own),
        last=tuple(row + end - start - 1 for row, (start, end) in own),
        sources=tuple(begins.get(end, -1) for _, (_, end) in own),
        most=most,
        origin=begins[0],
    )
