"""Plans of where experts are computed: pure functions of loads, ties by index."""

from __future__ import annotations

from collections.abc import Sequence


def greedy_placement(loads: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the experts of each rank: by falling load to the least loaded rank with a free slot.

    Args:
        loads: of each expert.
        ranks: how many; divides the experts.
    """
    slots = len(loads) // ranks
    found: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for expert in sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert)):
        rank = min(
            (rank for rank in range(ranks) if len(found[rank]) < slots), key=lambda rank: (totals[rank], rank)
        )
        found[rank].append(expert)
        totals[rank] += loads[expert]
    return found


def hot_experts(counts: Sequence[Sequence[int]], number: int) -> list[int]:
    """Return the experts that are worth a copy on every rank, the first chosen one first.

    Args:
        counts: ``[ranks][experts]``, rows that a rank sends to an expert; experts are placed contiguously.
        number: of experts at most.
    """
    ranks, experts = len(counts), len(counts[0])
    slots = experts // ranks
    loads = [sum(row[expert] for row in counts) for expert in range(experts)]
    totals = [sum(loads[rank * slots : (rank + 1) * slots]) for rank in range(ranks)]
    chosen: list[int] = []
    while len(chosen) < number:
        left = [expert for expert in range(experts) if expert not in chosen]
        if not left:
            break
        hot = min(left, key=lambda expert: (-totals[expert // slots], -loads[expert], expert))
        owner = hot // slots
        chosen.append(hot)
        for rank in range(ranks):
            if rank != owner:
                totals[owner] -= counts[rank][hot]
                totals[rank] += counts[rank][hot]
    return chosen
