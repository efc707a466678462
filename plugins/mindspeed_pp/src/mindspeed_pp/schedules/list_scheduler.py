"""A V-shaped schedule found by a list scheduler, with the times of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_pp.actions import Action
from mindspeed_pp.placement import vee
from mindspeed_pp.rule import Context, schedule

_KINDS = (("B", 0), ("B", 1), ("F", 1), ("F", 0), ("W", 1), ("W", 0))


@schedule("list", chunks=2, splits=True, place=lambda p, v: vee(p))
def list_scheduler(c: Context) -> Iterator[list[Action]]:
    """V-shaped like zbv, in the order that the times of forward, input and weight gradient suggest."""
    p, last = c.p, 2 * c.p - 1
    held = [(r, last - r) for r in range(p)]
    orders: list[list[Action]] = [[] for _ in range(p)]
    counts = [dict.fromkeys(_KINDS, 0) for _ in range(p)]
    free = [0.0] * p
    done: dict[tuple[str, int, int], float] = {}
    times = dict(zip("FBW", c.times))

    def ready(r: int, op: str, chunk: int) -> float | None:
        """Return when an action can begin; None where that is not known, or it has to wait its turn."""
        n, stage = counts[r], held[r][chunk]
        i = n[op, chunk]
        if i == c.m:
            return None
        if op == "W":
            return free[r] if i < n["B", chunk] else None
        if op == "B":
            needed = [("F", stage, i)] + ([("B", stage + 1, i)] if stage < last else [])
        else:
            alive = sum(n["F", k] - n["W", k] for k in (0, 1))
            runs_ahead = n["F", 0] - n["B", 1] >= 2 * p - r or n["F", 0] - n["F", 1] >= 2 * (p - r)
            if alive >= 2 * p or (chunk == 0 and runs_ahead):
                return None
            needed = [("F", stage - 1, i)] if stage else []
        if any(need not in done for need in needed):
            return None
        return max([free[r], *(done[need] for need in needed)])

    while any(count < c.m for n in counts for count in n.values()):
        able = [
            (start, rank, r, op, chunk)
            for r in range(p)
            for rank, (op, chunk) in enumerate(_KINDS)
            if (start := ready(r, op, chunk)) is not None
        ]
        start, _, r, op, chunk = min(able)
        i = counts[r][op, chunk]
        orders[r].append(Action(op, held[r][chunk], i))
        counts[r][op, chunk] += 1
        free[r] = done[op, held[r][chunk], i] = start + times[op] / 2
    yield from orders
