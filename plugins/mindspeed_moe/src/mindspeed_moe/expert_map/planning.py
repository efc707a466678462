"""Plans of where experts are computed: pure functions of loads, the same on every rank.

Ties are decided by index, and only Python numbers are compared, so that ranks with the same loads need no
message to agree on a plan.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Placement = list[list[int]]
"""The experts of each rank, in the order of their slots."""


@dataclass(frozen=True)
class Balance:
    """The largest load of a rank as a multiple of the mean: now, planned, and the least that is possible.

    Attributes:
        before: with the experts where they are.
        after: with the plan.
        bound: no placement of whole experts is better: one rank holds the most loaded one.
    """

    before: float
    after: float
    bound: float


def contiguous_placement(experts: int, ranks: int) -> Placement:
    """Return megatron-core's placement: expert ``e`` on rank ``e // (experts / ranks)``.

    Raises:
        ValueError: ``ranks`` does not divide ``experts``.
    """
    slots = _slots(experts, ranks)
    return [list(range(rank * slots, (rank + 1) * slots)) for rank in range(ranks)]


def greedy_placement(loads: Sequence[float], ranks: int, now: Placement | None = None) -> Placement:
    """Return a placement with as many experts on each rank and a smaller largest load, where there is one.

    Experts by falling load go to the least loaded rank with a free slot. Experts that stay on their rank keep
    their slot, and where the plan is not better than ``now``, ``now`` is the plan.

    Args:
        loads: of each expert.
        ranks: how many.
        now: the placement to improve, contiguous by default.

    Raises:
        ValueError: ``ranks`` does not divide the experts.
    """
    slots = _slots(len(loads), ranks)
    now = contiguous_placement(len(loads), ranks) if now is None else now
    found: Placement = [[] for _ in range(ranks)]
    totals: list[float] = [0.0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        free = (rank for rank in range(ranks) if len(found[rank]) < slots)
        rank = min(free, key=lambda rank: (totals[rank], rank))
        found[rank].append(expert)
        totals[rank] += loads[expert]
    if max(rank_loads(loads, found)) >= max(rank_loads(loads, now)):
        return [list(experts) for experts in now]
    return [_keeping_slots(experts, before) for experts, before in zip(found, now)]


def rank_loads(loads: Sequence[float], placement: Placement) -> list[float]:
    """Return the load of each rank."""
    return [float(sum(loads[expert] for expert in experts)) for experts in placement]


def variation(loads: Sequence[float], placement: Placement) -> float:
    """Return standard deviation through mean of the loads of ranks; 0 without any load."""
    totals = rank_loads(loads, placement)
    mean = statistics.fmean(totals)
    return statistics.pstdev(totals) / mean if mean else 0.0


def balance(loads: Sequence[float], now: Placement, planned: Placement) -> Balance:
    """Return how even the loads of ranks are, before and after a plan."""
    mean = sum(loads) / len(now)
    if not mean:
        return Balance(1.0, 1.0, 1.0)
    return Balance(
        max(rank_loads(loads, now)) / mean,
        max(rank_loads(loads, planned)) / mean,
        max(1.0, max(loads) / mean),
    )


def hot_experts(counts: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the experts that are worth a copy on every rank, the first chosen one first.

    Repeatedly takes the most loaded expert of the most loaded rank: with copies, its rows are computed where
    their tokens are. Of these, as many of the first are copied as make the largest rank smallest. An expert
    is chosen once, and none that no other rank sends anything.

    Args:
        counts: ``[ranks][experts]``, rows that a rank sends to an expert; experts are placed contiguously.
        number: of experts at most.
    """
    return _chosen(counts, number)[0]


def rows_with_copies(counts: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the rows that each rank computes with copies of `hot_experts`."""
    return _chosen(counts, number)[1]


def _chosen(counts: Sequence[Sequence[int]], number: int) -> tuple[list[int], list[int]]:
    ranks, experts = len(counts), len(counts[0])
    slots = _slots(experts, ranks)
    loads = [sum(row[expert] for row in counts) for expert in range(experts)]
    totals = [sum(loads[rank * slots : (rank + 1) * slots]) for rank in range(ranks)]
    chosen: list[int] = []
    best: tuple[list[int], list[int]] = [], list(totals)
    while len(chosen) < number:
        left = [
            (expert // slots, expert)
            for expert in range(experts)
            if expert not in chosen and loads[expert] > counts[expert // slots][expert]
        ]
        if not left:
            break
        owner, hot = min(left, key=lambda one: (-totals[one[0]], one[0], -loads[one[1]], one[1]))
        chosen.append(hot)
        for rank, row in enumerate(counts):
            if rank != owner:
                totals[owner] -= row[hot]
                totals[rank] += row[hot]
        if max(totals) < max(best[1]):
            best = list(chosen), list(totals)
    return best


def _keeping_slots(experts: list[int], before: list[int]) -> list[int]:
    arriving = iter(sorted(set(experts) - set(before)))
    return [expert if expert in experts else next(arriving) for expert in before]


def _slots(experts: int, ranks: int) -> int:
    if ranks < 1 or experts % ranks:
        raise ValueError(f"{experts} experts cannot be spread evenly over {ranks} ranks")
    return experts // ranks
