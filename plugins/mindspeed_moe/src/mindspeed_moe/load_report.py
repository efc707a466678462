"""Judge a layout by recorded loads: dropped choices, uneven ranks, and what would send or wait less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mindspeed_moe.comm_plans import DEDUP, FLAT, GATHER, Exchanged, cheapest, hops_of
from mindspeed_moe.expert_map.planning import greedy_placement, hot_experts
from mindspeed_moe.load_log import LoadedModel, LoadLog, mean_loads

COPIES = (1, 3, 8)
"""Numbers of hot experts of a rank that are compared."""


@dataclass(frozen=True)
class Unevenness:
    """The largest load of a rank over the mean, by where experts are computed.

    Attributes:
        contiguous: where megatron-core places them.
        greedy: experts by falling load on the least loaded rank.
        copied: with copies of so many hot experts on every rank, as if every rank sent as many tokens.
        bound: no placement without copies is better.
    """

    contiguous: float
    greedy: float
    copied: dict[int, float]
    bound: float


@dataclass(frozen=True)
class LayerLoads:
    """Mean loads of one layer.

    Attributes:
        layer: its number, from 1.
        experts: tokens of each expert.
        ranks: tokens of each rank, experts placed contiguously.
        dropped: part of all choices that no expert computed.
        unevenness: by where experts are computed.
    """

    layer: int
    experts: list[float]
    ranks: list[float]
    dropped: float
    unevenness: Unevenness


@dataclass(frozen=True)
class Report:
    """The report on one file.

    Attributes:
        steps: how many were recorded.
        layers: of the model.
        dispatcher: that sends fewer bytes, and why.
        plan: of communication that is expected to send the fewest bytes between nodes, and why.
        placement: what would make ranks more even, and why.
    """

    steps: int
    layers: list[LayerLoads]
    dispatcher: tuple[str, str]
    plan: tuple[str, str]
    placement: tuple[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def report_on(log: LoadLog) -> Report:
    """Return what a file of loads says."""
    model, layers = log.model, []
    for layer, loads in mean_loads(log.steps).items():
        chosen = sum(step.chosen[layer] for step in log.steps if layer in step.chosen)
        computed = sum(sum(step.loads[layer]) for step in log.steps if layer in step.loads)
        dropped = max(0.0, 1 - computed / chosen) if chosen else 0.0
        ranks = _of_ranks(loads, _contiguous(model.experts, model.ranks))
        layers.append(LayerLoads(layer, loads, ranks, dropped, unevenness(loads, model.ranks)))
    return Report(len(log.steps), layers, _dispatcher(model), _plan(model), _placement(layers, model.ranks))


def unevenness(loads: Sequence[float], ranks: int) -> Unevenness:
    """Return how uneven ranks are with each way to place experts.

    Args:
        loads: of each expert.
        ranks: how many.
    """
    contiguous, mean = _contiguous(len(loads), ranks), sum(loads) / ranks
    if not mean:
        return Unevenness(1.0, 1.0, dict.fromkeys(COPIES, 1.0), 1.0)
    slots = len(loads) // ranks
    counts = [[round(load / ranks) for load in loads] for _ in range(ranks)]
    copied = {}
    for number in COPIES:
        if number > slots:
            continue
        totals = _of_ranks(loads, contiguous)
        for hot in hot_experts(counts, number):
            owner = hot // slots
            totals[owner] -= loads[hot]
            totals = [total + loads[hot] / ranks for total in totals]
        copied[number] = max(totals) / mean
    return Unevenness(
        max(_of_ranks(loads, contiguous)) / mean,
        max(_of_ranks(loads, greedy_placement(loads, ranks))) / mean,
        copied,
        max(1.0, max(loads) / mean),
    )


def _contiguous(experts: int, ranks: int) -> list[list[int]]:
    slots = experts // ranks
    return [list(range(rank * slots, (rank + 1) * slots)) for rank in range(ranks)]


def _of_ranks(loads: Sequence[float], placement: Sequence[Sequence[int]]) -> list[float]:
    return [float(sum(loads[expert] for expert in experts)) for experts in placement]


def _dispatcher(model: LoadedModel) -> tuple[str, str]:
    ranks, choices = model.gathering_ranks, model.choices
    if ranks == 1:
        return model.dispatcher, "all experts are on one rank"
    if choices > ranks:
        return "allgather", f"a token goes to {choices} experts, more than the {ranks} ranks that gather it"
    return (
        "alltoall",
        f"a token goes to {choices} experts, not more than the {ranks} ranks that would gather it",
    )


def _plan(model: LoadedModel) -> tuple[str, str]:
    nodes = model.ranks // model.node_size
    if nodes == 1:
        return FLAT, f"the {model.ranks} ranks of experts are on one node"
    sizes = Exchanged(
        model.tokens, model.choices, model.experts, model.row_bytes, model.prob_bytes, model.reached
    )
    counted = [
        f"{name} {sizes.expected_bytes(hops_of(name, model.ranks, model.node_size), nodes):,.0f}"
        for name in (FLAT, GATHER, DEDUP)
    ]
    return (
        cheapest(sizes, model.ranks, model.node_size),
        f"expected bytes to other nodes, per rank, layer, micro-batch and direction: {', '.join(counted)}",
    )


def _placement(layers: Sequence[LayerLoads], ranks: int) -> tuple[str, str]:
    if ranks == 1:
        return "contiguous", "all experts are on one rank"

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    now = mean([layer.unevenness.contiguous for layer in layers])
    greedy = mean([layer.unevenness.greedy for layer in layers])
    copied = {
        number: mean([layer.unevenness.copied[number] for layer in layers])
        for number in layers[0].unevenness.copied
    }
    said = f"largest rank over the mean {now:.2f}, {greedy:.2f} with experts placed by load"
    if copied:
        number = min(copied, key=lambda number: (copied[number], number))
        said += f", {copied[number]:.2f} with {number} hot experts copied"
        # A copy is sent in each micro-batch, an expert moves once.
        if copied[number] < 0.9 * min(now, greedy):
            return f"{number} hot experts", said
    return ("greedy" if greedy < 0.98 * now else "contiguous"), said
