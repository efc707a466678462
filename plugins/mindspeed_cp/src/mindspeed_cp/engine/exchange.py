"""The rows of keys that every rank fetches from every other: pure index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindspeed_cp.engine.layout import Chunks, Interval, Layout, numbered, union
from mindspeed_cp.engine.masks import MaskRule


@dataclass(frozen=True)
class Exchange:
    """The local key rows that go to each rank, and the places of those that come.

    Attributes:
        send: for every rank the local rows that it needs of this one.
        receive: number of rows that come from every rank.
        order: position, among the rows that came, of each row in rising order of global positions.
        chunks: intervals of global positions of the sorted rows, with the row at which each starts.
    """

    send: tuple[np.ndarray, ...]
    receive: tuple[int, ...]
    order: np.ndarray
    chunks: Chunks


def needed_rows(layout: Layout, rules: Sequence[MaskRule]) -> list[list[Interval]]:
    """Return, for every rank, the positions of the keys that its queries see under any of the rules."""
    return [
        union(interval for rule in rules for interval in rule.needed_keys(share)) for share in layout.shares
    ]


def exchange(layout: Layout, rank: int, needed: Sequence[Sequence[Interval]]) -> Exchange:
    """Build the exchange of one rank from what every rank needs."""
    positions = [layout.positions(source) for source in range(layout.ranks)]
    send = tuple(np.flatnonzero(_inside(positions[rank], needed[target])) for target in range(layout.ranks))
    came = [position[_inside(position, needed[rank])] for position in positions]
    arrived = np.concatenate(came)
    order = np.argsort(arrived, kind="stable")
    return Exchange(send, tuple(len(part) for part in came), order, numbered(needed[rank]))


def _inside(positions: np.ndarray, intervals: Sequence[Interval]) -> np.ndarray:
    if not intervals:
        return np.zeros(len(positions), dtype=bool)
    starts = np.array([start for start, _ in intervals])
    ends = np.array([end for _, end in intervals])
    index = np.searchsorted(starts, positions, side="right") - 1
    return (index >= 0) & (positions < ends[np.maximum(index, 0)])
