"""Choice of saved tensors that wait on the host, from the trace of one step; no torch.

A tensor is taken away as soon as it was saved and brought back just in time. Copies of each direction follow
one another. A tensor that would not be back in time, or would make another one late, stays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
        peak: most bytes with them on the host.
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

    chosen: dict[Place, list[Life]] = {}
    peak = plain
    useful = [place for place in lives if covered[place]]
    for place in sorted(useful, key=lambda place: (-score(place), place)):
        if peak <= target:
            break
        with_it = {**chosen, place: lives[place]}
        away = _away(with_it, bandwidth)
        if away is not None:
            chosen, peak = with_it, _peak(trace, away)
    return Swaps(frozenset(_without_the_useless(trace, chosen, bandwidth, max(peak, target))), peak, plain)


def _without_the_useless(
    trace: Trace, chosen: Mapping[Place, list[Life]], bandwidth: float, peak: int
) -> list[Place]:
    """Return the places that the peak needs, the last ones given up first."""
    kept = dict(chosen)
    for place in reversed(list(chosen)):
        fewer = {other: found for other, found in kept.items() if other != place}
        away = _away(fewer, bandwidth)
        if away is not None and _peak(trace, away) <= peak:
            kept = fewer
    return list(kept)


def _covered(life: Life, high: Sequence[float]) -> int:
    """Return how many of these times, in their order, lie between saving and reading."""
    return max(0, bisect_right(high, life.needed) - bisect_right(high, life.saved))


def _away(chosen: Mapping[Place, Sequence[Life]], bandwidth: float) -> list[tuple[float, float, int]] | None:
    """Return from when to when each storage is gone, with its bytes; None where one is late."""
    lives = [life for found in chosen.values() for life in found]
    gone: dict[int, float] = {}
    free = 0.0
    for index in sorted(range(len(lives)), key=lambda index: lives[index].saved):
        free = max(free, lives[index].saved) + lives[index].nbytes / bandwidth
        gone[index] = free
    found = []
    free = float("inf")
    for index in sorted(range(len(lives)), key=lambda index: -lives[index].needed):
        free = min(free, lives[index].needed) - lives[index].nbytes / bandwidth
        if free < gone[index]:
            return None
        found.append((gone[index], free, lives[index].nbytes))
    return found


def _peak(trace: Trace, away: Sequence[tuple[float, float, int]]) -> int:
    """Return the most bytes where storages are gone during the whole time between two samples."""
    times = [time for time, _ in trace.alive]
    change = [0] * (len(times) + 1)
    for start, end, nbytes in away:
        first, behind = bisect_left(times, start) + 1, bisect_right(times, end)
        if first < behind:
            change[first] -= nbytes
            change[behind] += nbytes
    less = accumulate(change)
    return max((nbytes + fewer for (_, nbytes), fewer in zip(trace.alive, less)), default=0)


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
