"""Blocks of rows of a task, and their masks, biases and kept weights.

What is made for each score must stay small, whatever the length of the sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mindspeed_cp.engine.masks import CAUSAL, FULL, MASKED, MaskRule
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import Task

Band = tuple[int, int]
"""Keys before and behind that a query sees, from the diagonal that ends in the last row and column."""


def is_band(task: Task, rule: MaskRule) -> bool:
    """Return whether the mask of a task is a band around a diagonal: a window alone, in one document."""
    if task.kind != MASKED or rule.window is None or rule.matrix is not None:
        return False
    (first, start), ends = task.origin, rule.ends
    last = max(first + task.rows[1] - task.rows[0], start + task.columns[1] - task.columns[0]) - 1
    return not ends or bisect_right(ends, min(first, start)) == bisect_right(ends, last)


def band(task: Task, rule: MaskRule) -> Band:
    """Return the band of a task that is one.

    Query ``i`` of ``s`` sees key ``j`` of ``t`` where ``-before <= j - (i + t - s) <= behind``.
    """
    assert rule.window is not None
    last_query = task.origin[0] + task.rows[1] - task.rows[0]
    last_key = task.origin[1] + task.columns[1] - task.columns[0]
    # Where the last query and the last key of the rectangle meet is where its own diagonal ends.
    shift = last_query - last_key
    return rule.window - shift, shift + (0 if rule.causal else rule.window)


@lru_cache(maxsize=1024)
def in_rows(task: Task, most: int) -> tuple[Task, ...]:
    """Cut a task into blocks of at most ``most`` rows.

    Rows of a triangle are a rectangle and a smaller triangle, which needs no mask.
    """
    (start, end), (first, last) = task.rows, task.columns
    if end - start <= most:
        return (task,)
    found = []
    for low in range(start, end, most):
        high, offset = min(low + most, end), low - start
        origin = (task.origin[0] + offset, task.origin[1])
        if task.kind == CAUSAL:
            if offset:
                found.append(Task((low, high), (first, first + offset), FULL, origin))
            columns = (first + offset, first + offset + high - low)
            found.append(Task((low, high), columns, CAUSAL, (origin[0], origin[1] + offset)))
        else:
            found.append(Task((low, high), (first, last), task.kind, origin))
    return tuple(found)


def part_shape(task: Task, scores: Scores) -> Hashable:
    """Return everything that decides which operations a part takes, and on how many elements."""
    rows, columns = task.rows[1] - task.rows[0], task.columns[1] - task.columns[0]
    if task.kind != MASKED:
        return task.kind, rows, columns
    if scores.rule.matrix is not None:
        return task
    start = task.origin[1]
    low, high = scores.rule.reach(positions(task)[0])
    hides = bool(low.max() > start or high.min() < start + columns)
    return task.kind, rows, columns, hides, is_band(task, scores.rule)


def positions(task: Task) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the global positions of the queries and of the keys of a task."""
    rows, columns = task.rows[1] - task.rows[0], task.columns[1] - task.columns[0]
    first, start = task.origin
    return np.arange(first, first + rows), np.arange(start, start + columns)


def hidden(task: Task, scores: Scores, device: torch.device) -> Tensor | None:
    """Return ``[q, k]`` bool, which scores of a masked task do not count; None where all do."""
    seen = scores.rule.visible(*positions(task))
    return None if bool(seen.all()) else torch.from_numpy(~seen).to(device)


def added(task: Task, scores: Scores, query: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what is added to scores of ``query``, ``[1, n or 1, q, k]``, and which rows see nothing.

    It is float32, for float64 queries float64. Kernels know whole rectangles and triangles themselves; with a
    bias, triangles are hidden here too.
    """
    if task.kind != MASKED and scores.slopes is None:
        return None, None
    mask = empty = None
    device, wide = query.device, torch.promote_types(query.dtype, torch.float32)
    away = None if task.kind == FULL else hidden(task, scores, device)
    if away is not None:
        mask = torch.zeros(away.shape, dtype=wide, device=device).masked_fill_(away, float("-inf"))
        empty = away.all(1)
    if scores.slopes is not None:
        queries, keys = positions(task)
        distance = torch.from_numpy(np.abs(queries[:, None] - keys[None, :])).to(device, wide)
        distance = distance.sqrt() if scores.root else distance
        bias = -scores.slopes.to(device, wide).view(-1, 1, 1) * distance
        mask = bias if mask is None else bias + mask
    if mask is None:
        return None, None
    return mask.view(1, -1, *mask.shape[-2:]), empty


def kept(task: Task, scores: Scores, samples: int, device: torch.device) -> Tensor | None:
    """Return ``[b, n, q, k]`` bool, which weights are not dropped; None without dropout."""
    if scores.dropout is None:
        return None
    assert scores.heads is not None
    queries, keys = (torch.from_numpy(numbers).to(device) for numbers in positions(task))
    return scores.dropout.kept(scores.heads.to(device), samples, queries, keys)


def without_empty(output: Tensor, logsum: Tensor, empty: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return results with zeros and minus infinity in rows that see nothing."""
    if empty is None:
        return output, logsum
    return output.masked_fill(empty.unsqueeze(-1), 0.0), logsum.masked_fill(empty, float("-inf"))
