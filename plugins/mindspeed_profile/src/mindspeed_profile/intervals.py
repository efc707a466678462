"""Sets of moments as sorted, disjoint intervals ``[begin, end)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Intervals = list[tuple[float, float]]


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the moments of any of the intervals."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def within(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """Return the moments that two unions share."""
    found: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(a: Sequence[tuple[float, float]], b: Sequence[tuple[float, float]]) -> Intervals:
    """Return the moments of the first union that the second has not."""
    found: Intervals = []
    j = 0
    for begin, end in a:
        at = begin
        while j < len(b) and b[j][1] <= at:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > at:
                found.append((at, b[k][0]))
            at = max(at, b[k][1])
            k += 1
        if at < end:
            found.append((at, end))
    return found


def length(intervals: Iterable[tuple[float, float]]) -> float:
    """Return how long a union is."""
    return sum(end - begin for begin, end in intervals)
