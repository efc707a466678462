"""Chimera: copies of the model that run down and up the same ranks share the micro-batches of a step.

Source of the idea: "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines"
(arXiv 2107.06925); MindSpeed's ``--schedules-method chimera``. Where one copy waits for its last stage,
another one computes its first. A rank holds as many stages as there are copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_pp.actions import A, Action, B, F, W
from mindspeed_pp.asked import COPIES_FLAG
from mindspeed_pp.placement import mirrored
from mindspeed_pp.rule import Context, schedule

DECOUPLED = "decouple_bw"
"""Option: behind its last forward pass a rank computes gradients of weights where it would wait."""


def refusal(p: int, v: int, m: int | None) -> str:
    """Return why ranks, copies and micro-batches do not go, or an empty string."""
    if v < 2 or v & (v - 1):
        return f"{COPIES_FLAG} {v}: the model is held 2, 4, 8, ... times; give a power of two"
    if v > p:
        return f"{COPIES_FLAG} {v}: {p} pipeline ranks hold at most {p} copies; lower it, or use more ranks"
    if p % v:
        return f"{COPIES_FLAG} {v}: {p} pipeline ranks are no multiple of it; change one of the two"
    if m is not None and m % v:
        return (
            f"{COPIES_FLAG} {v}: {v} copies cannot share {m} micro-batches; change --global-batch-size so "
            f"that there is a multiple of {v}"
        )
    return ""


@schedule("chimera", chunks=None, place=mirrored, refuses=refusal)
def chimera(c: Context) -> Iterator[list[Action]]:
    """Copies of the model in both directions share the micro-batches; as many times the weights."""
    placement = mirrored(c.p, c.v)
    decouples = bool(c.options.get(DECOUPLED))
    forward, to_input, weight = c.times
    orders: list[list[Action]] = [[] for _ in range(c.p)]
    free = [0.0] * c.p
    done: dict[tuple[str, int, int], float] = {}
    # Of each stage: micro-batches of its copy, and how many went forward and backward.
    todo = [[i for i in range(c.m) if placement.owns(s, i)] for s in range(placement.stages)]
    ahead, behind = [0] * placement.stages, [0] * placement.stages
    waiting: list[list[Action]] = [[] for _ in range(c.p)]

    def ready(rank: int) -> Iterator[tuple[float, int, int, int, str, int]]:
        """Yield what a rank can do: when, passes backward and the first micro-batches before others."""
        for s in placement.held[rank]:
            if behind[s] < ahead[s]:
                i = todo[s][behind[s]]
                needed = [("F", s, i)] if placement.is_last(s) else [("F", s, i), ("B", s + 1, i)]
                if all(need in done for need in needed):
                    yield max(free[rank], *(done[need] for need in needed)), 0, i, rank, "B", s
            if ahead[s] < len(todo[s]) and ahead[s] - behind[s] < c.p - placement.position(s):
                i = todo[s][ahead[s]]
                if placement.is_first(s):
                    yield free[rank], 1, i, rank, "F", s
                elif ("F", s - 1, i) in done:
                    yield max(free[rank], done["F", s - 1, i]), 1, i, rank, "F", s

    while any(behind[s] < len(todo[s]) for s in range(placement.stages)):
        start, _, i, rank, op, s = min(each for rank in range(c.p) for each in ready(rank))
        if waiting[rank] and start >= free[rank] + weight:
            orders[rank].append(waiting[rank].pop(0))
            free[rank] += weight
            continue
        last = all(ahead[other] == len(todo[other]) for other in placement.held[rank])
        if op == "F":
            orders[rank].append(F(s, i))
            ahead[s] += 1
            free[rank] = done["F", s, i] = start + forward
        else:
            apart = decouples and last and not placement.is_first(s)
            orders[rank].append((B if apart else A)(s, i))
            behind[s] += 1
            free[rank] = start + to_input + (0.0 if apart else weight)
            done["B", s, i] = free[rank]
            if apart:
                waiting[rank].append(W(s, i))
    for order, later in zip(orders, waiting):
        yield order + later
