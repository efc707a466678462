"""Choice of saved tensors that wait on the host, from the trace of one step; no torch.

A tensor is taken away as soon as it was saved and brought back just in time. Copies of each direction follow
one another. A tensor that would not be back in time, or would make another one late, stays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Place = tuple[int, int]
"""Number of the chunk, and number of the first of the values that are saved of one storage in a pass."""


@dataclass(frozen=True)
class Life:
    """A saved storage in one micro-batch.

    Attributes:
        place: which one of a pass it is.
        nbytes: of the storage.
        saved: seconds at which it is saved.
        needed: seconds at which it is read first.
    """

    place: Place
    nbytes: int
    saved: float
    needed: float


@dataclass(frozen=True)
class Trace:
    """One step.

    Attributes:
        lives: of all storages that could be swapped, in all micro-batches.
        alive: seconds, and most bytes between the sample before and this one.
    """

    lives: tuple[Life, ...]
    alive: tuple[tuple[float, int], ...]


@dataclass(frozen=True)
class Swaps:
    """A choice.

    Attributes:
        places: of the storages that are swapped.
        peak: most bytes with exactly them on the host.
        plain_peak: most bytes without.
    """

    places: frozenset[Place]
    peak: int
    plain_peak: int


def chosen_swaps(trace: Trace, *, bandwidth: float, reduction: int | None = None) -> Swaps:
    """Return the storages to swap: those that cover the peak longest and are largest come first.

    Args:
        trace: of a step.
        bandwidth: bytes a second between device and host, each way.
        reduction: bytes by which the peak is to fall; None for as many as can be swapped in time.
    """
    plain = max((nbytes for _, nbytes in trace.alive), default=0)
    lives: dict[Place, list[Life]] = {}
    for life in trace.lives:
        lives.setdefault(life.place, []).append(life)
    target = plain - reduction if reduction is not None else 0
    # What is alive above this level is the peak that is to be covered.
    level = target if reduction is not None else plain // 2
    high = [time for time, nbytes in trace.alive if nbytes > level]
    covered = {place: sum(_covered(life, high) for life in found) for place, found in lives.items()}
    largest = max((life.nbytes for life in trace.lives), default=0)

    def score(place: Place) -> float:
        size = (max(life.nbytes for life in lives[place]) / largest) ** (1 / 3)
        return covered[place] / (len(high) * len(lives[place])) + 2 * size

    copies = _Copies(trace, bandwidth)
    chosen: list[Place] = []
    peak = plain
    useful = [place for place in lives if covered[place]]
    for place in sorted(useful, key=lambda place: (-score(place), place)):
        if peak <= target:
            break
        with_it = copies.peak([*chosen, place])
        if with_it is not None:
            chosen, peak = [*chosen, place], with_it
    kept = _without_the_useless(copies, chosen, max(peak, target))
    reached = copies.peak(kept)
    assert reached is not None
    return Swaps(frozenset(kept), reached, plain)


def _without_the_useless(copies: _Copies, chosen: Sequence[Place], peak: int) -> list[Place]:
    """Return the places that the peak needs, the last ones given up first."""
    kept = list(chosen)
    for place in reversed(chosen):
        fewer = [other for other in kept if other != place]
        reached = copies.peak(fewer)
        if reached is not None and reached <= peak:
            kept = fewer
    return kept


def _covered(life: Life, high: Sequence[float]) -> int:
    """Return how many of these times, in their order, lie between saving and reading."""
    return max(0, bisect_right(high, life.needed) - bisect_right(high, life.saved))


class _Copies:
    """The copies of a trace in the order of their times, sorted once for all choices."""

    def __init__(self, trace: Trace, bandwidth: float) -> None:
        self._rank = {place: rank for rank, place in enumerate(sorted({life.place for life in trace.lives}))}
        places = np.array([self._rank[life.place] for life in trace.lives], dtype=np.int64)
        self._nbytes = np.array([life.nbytes for life in trace.lives], dtype=np.int64)
        saved = np.array([life.saved for life in trace.lives], dtype=np.float64)
        needed = np.array([life.needed for life in trace.lives], dtype=np.float64)
        self._seconds = self._nbytes / bandwidth
        self._places, self._saved, self._needed = places, saved, needed
        self._going = np.argsort(saved, kind="stable")
        self._coming = np.argsort(-needed, kind="stable")
        self._times = np.array([time for time, _ in trace.alive], dtype=np.float64)
        self._alive = np.array([nbytes for _, nbytes in trace.alive], dtype=np.int64)
        # Sums in another order than one copy after the other differ by so much.
        self._rounding = 1e-9 * float(self._seconds.min(initial=np.inf)) if len(places) else 0.0

    def peak(self, chosen: Sequence[Place]) -> int | None:
        """Return the most bytes with the storages of these places on the host; None where one is late.

        A storage counts as gone during the whole time between two samples alone.
        """
        taken = np.zeros(len(self._rank), dtype=bool)
        taken[[self._rank[place] for place in chosen]] = True
        going = self._going[taken[self._places[self._going]]]
        coming = self._coming[taken[self._places[self._coming]]]
        # A copy begins when its tensor is there and the one before is over: the latest of all such sums.
        over = np.cumsum(self._seconds[going])
        gone = np.empty(len(self._places))
        gone[going] = over + np.maximum.accumulate(self._saved[going] - over + self._seconds[going])
        over = np.cumsum(self._seconds[coming])
        back = np.empty(len(self._places))
        back[coming] = np.minimum.accumulate(self._needed[coming] + over - self._seconds[coming]) - over
        if np.any(back[going] < gone[going] - self._rounding):
            return None
        first = np.searchsorted(self._times, gone[going], side="left") + 1
        behind = np.searchsorted(self._times, back[going], side="right")
        gaps = first < behind
        change = np.zeros(len(self._times) + 1, dtype=np.int64)
        np.subtract.at(change, first[gaps], self._nbytes[going][gaps])
        np.add.at(change, behind[gaps], self._nbytes[going][gaps])
        less = np.cumsum(change)[: len(self._alive)]
        return int((self._alive + less).max(initial=0))


def by_chunk(places: frozenset[Place], groups: Mapping[Place, Sequence[int]]) -> dict[int, list[int]]:
    """Return the numbers of the values that are swapped in a pass through each chunk.

    Args:
        places: of storages.
        groups: the numbers of all values that are saved of each.
    """
    found: dict[int, list[int]] = {}
    for place in sorted(places):
        found.setdefault(place[0], []).extend(groups[place])
    return {chunk: sorted(numbers) for chunk, numbers in found.items()}
