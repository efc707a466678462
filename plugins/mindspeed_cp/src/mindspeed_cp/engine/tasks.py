"""The calls of block kernels for a rank's rows and keys: pieces of a mask rule, joined where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_cp.engine.layout import Chunks, Interval
from mindspeed_cp.engine.masks import CAUSAL, FULL, MaskRule


@dataclass(frozen=True)
class Task:
    """One call of the block kernel.

    Attributes:
        rows: local query rows.
        columns: local key rows.
        kind: see `mindspeed_cp.engine.masks`.
        origin: global position of the first query and of the first key; those of the others follow where
            rows were not joined.
    """

    rows: Interval
    columns: Interval
    kind: str
    origin: tuple[int, int] = (0, 0)


@lru_cache(maxsize=1024)
def tasks(rule: MaskRule, queries: Chunks, keys: Chunks, *, positions: bool = False) -> tuple[Task, ...]:
    """Return everything that is computed between query rows and key rows; made once for all layers.

    Args:
        rule: which scores count.
        queries: chunks of the query rows.
        keys: chunks of the key rows that are held.
        positions: the kernel needs global positions (a bias, or dropout): rows of different chunks are not
            joined.
    """
    found: list[Task] = []
    for q_local, q in queries:
        for k_local, k in keys:
            if q[0] == q[1] or k[0] == k[1]:
                continue
            for piece in rule.pieces(q, k):
                rows = (piece.queries[0] - q[0] + q_local, piece.queries[1] - q[0] + q_local)
                columns = (piece.keys[0] - k[0] + k_local, piece.keys[1] - k[0] + k_local)
                found.append(Task(rows, columns, piece.kind, (piece.queries[0], piece.keys[0])))
    return tuple(found) if positions else tuple(joined(found))


def joined(tasks: Sequence[Task]) -> list[Task]:
    """Join tasks into fewer: neighbouring rectangles, and triangles with the rectangle between them."""
    rest = list(tasks)
    while True:
        parts, whole = _joinable(rest)
        if whole is None:
            return rest
        rest = [task for task in rest if task not in parts]
        rest.append(whole)


def _joinable(found: Sequence[Task]) -> tuple[tuple[Task, ...], Task | None]:
    full = {(task.rows, task.columns): task for task in found if task.kind == FULL}
    by_rows = {(task.rows, task.columns[0]): task for task in full.values()}
    by_columns = {(task.columns, task.rows[0]): task for task in full.values()}
    for task in full.values():
        beside = by_rows.get((task.rows, task.columns[1]))
        if beside is not None:
            whole = Task(task.rows, (task.columns[0], beside.columns[1]), FULL, task.origin)
            return (task, beside), whole
        below = by_columns.get((task.columns, task.rows[1]))
        if below is not None:
            return (task, below), Task((task.rows[0], below.rows[1]), task.columns, FULL, task.origin)
    triangles = {task.rows: task for task in found if task.kind == CAUSAL and task.rows == task.columns}
    for rows, task in triangles.items():
        for later, other in triangles.items():
            between = full.get((later, rows))
            if later[0] == rows[1] and between is not None:
                corner = (rows[0], later[1])
                return (task, other, between), Task(corner, corner, CAUSAL, task.origin)
    return (), None
