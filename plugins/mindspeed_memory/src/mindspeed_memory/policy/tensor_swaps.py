"""Choice of saved tensors that wait on the host, from the trace of one step; no torch.

A tensor is taken away as soon as it was saved and brought back just in time. Copies of each direction follow
one another. A tensor that would not be back in time, or would make another one late, stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    order = sorted(lives, key=lambda place: (-_score(lives[place], trace, level), place))
    largest_first = [place for place in order if _covers(lives[place], trace, level)]
    chosen: list[Life] = []
    places: set[Place] = set()
    peak = plain
    for place in largest_first:
        if peak <= target:
            break
        with_it = [*chosen, *lives[place]]
        away = _away(with_it, bandwidth)
        if away is None:
            continue
        chosen = with_it
        places.add(place)
        peak = _peak(trace, away)
    return Swaps(frozenset(places), peak, plain)


def _score(lives: Sequence[Life], trace: Trace, level: int) -> float:
    """Return how much of the peak is covered, and twice the cube root of the size beside the largest."""
    times = [time for time, nbytes in trace.alive if nbytes > level]
    covered = sum(life.saved < time <= life.needed for life in lives for time in times)
    largest = max(life.nbytes for life in trace.lives)
    size = (max(life.nbytes for life in lives) / largest) ** (1 / 3)
    return covered / max(1, len(times) * len(lives)) + 2 * size


def _covers(lives: Sequence[Life], trace: Trace, level: int) -> bool:
    return any(
        life.saved < time <= life.needed for life in lives for time, nbytes in trace.alive if nbytes > level
    )


def _away(lives: Sequence[Life], bandwidth: float) -> list[tuple[float, float, int]] | None:
    """Return from when to when each storage is gone, with its bytes; None where one is late."""
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
    found, before = 0, float("-inf")
    for time, nbytes in trace.alive:
        less = sum(size for start, end, size in away if start <= before and time <= end)
        found = max(found, nbytes - less)
        before = time
    return found


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
