"""Check that parts make up a whole: boxes that tile a larger one exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""

_STEPS_A_BOX = 1000


def uncovered(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return what is wrong where boxes do not tile a shape exactly, or an empty text.

    The effort is bounded by the number of boxes; a tiling that needs more counts as none.
    """
    rank = len(shape)
    solid = []
    for offsets, sizes in boxes:
        if len(offsets) != rank or len(sizes) != rank:
            return f"have another number of dimensions than its {rank}"
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape)):
            return "lie outside of it"
        if math.prod(sizes):
            solid.append((offsets, sizes))
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in solid)
    if missing > 0:
        return f"leave {missing} of its elements out"
    if missing < 0:
        return "overlap"
    if not rank or len(solid) < 2:
        return ""
    budget = [_STEPS_A_BOX * len(solid)]
    # The volumes agree, so that boxes that do not overlap leave nothing out.
    if _overlap(solid, 0, rank, budget):
        return "overlap"
    return "" if budget[0] >= 0 else "are cut too irregularly to be checked"


def _overlap(boxes: Sequence[Box], axis: int, rank: int, budget: list[int]) -> bool:
    """Return whether any two boxes overlap in the axes from ``axis`` on."""
    if len(boxes) < 2:
        return False
    if axis == rank:
        return True
    ordered = sorted(boxes, key=lambda box: box[0][axis])
    budget[0] -= len(boxes)
    if budget[0] < 0:
        return False
    active: list[Box] = []
    at = 0
    while at < len(ordered):
        begin = ordered[at][0][axis]
        active = [box for box in active if box[0][axis] + box[1][axis] > begin]
        first = len(active)
        while at < len(ordered) and ordered[at][0][axis] == begin:
            active.append(ordered[at])
            at += 1
        budget[0] -= first
        if _overlap(active, axis + 1, rank, budget):
            return True
        if budget[0] < 0:
            return False
    return False
