"""Measured costs of the forms in which layers can run, and plans made of them; no torch.

All ranks of a pipeline stage measure, and plan from the largest values of any of them: each reaches the same
plan, and the plan holds on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mindspeed_memory.policy.knapsack import Form, Group, fastest_plan

WHOLE, NOTHING, FEED_FORWARD, ATTENTION, ACTIVATION, SWAP = (
    *("whole layer", "nothing", "feed-forward", "attention", "activation function", "swap"),
)
"""Parts of a layer that a form recomputes, or offloads to the host."""


@dataclass
class Costs:
    """The costs of one kind of layer in one model chunk.

    Attributes:
        layers: how many there are.
        nbytes: bytes that a layer keeps after its forward pass, by form.
        seconds: time that a form adds to forward and backward, by form.
        moving: bytes that swapping moves for one layer.
    """

    layers: int
    nbytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    moving: int = 0


@dataclass
class Measured:
    """The measurements of one rank.

    Attributes:
        stage: pipeline stage.
        resident: bytes between steps: parameters, gradients, state of the optimizer.
        peak: most bytes beyond these, with every layer computed again as a whole.
        head: the same between the last layer's forward and backward pass, where only the loss is computed.
        last: kind of the last layer.
        under_way: most micro-batches whose activations a chunk holds at a time, by chunk.
        costs: by chunk and kind of layer.
    """

    stage: int = 0
    resident: int = 0
    peak: int = 0
    head: int = 0
    last: str = ""
    under_way: dict[int, int] = field(default_factory=dict)
    costs: dict[tuple[int, str], Costs] = field(default_factory=dict)

    @property
    def needed(self) -> int:
        """Bytes with every layer computed again as a whole."""
        return self.resident + self.peak


@dataclass(frozen=True)
class StagePlan:
    """The plan of a pipeline stage.

    Attributes:
        forms: for each chunk and kind of layer the forms of its layers, in their order.
        nbytes: bytes beyond those of full recomputation.
        seconds: time that is added to a pass of one micro-batch through all layers.
        seconds_of_full: what full recomputation adds.
    """

    forms: Mapping[tuple[int, str], tuple[str, ...]]
    nbytes: int
    seconds: float
    seconds_of_full: float


def of_stage(measured: Sequence[Measured], stage: int) -> Measured:
    """Return the largest values that any rank of a stage measured.

    Args:
        measured: of all ranks.
        stage: pipeline stage.
    """
    ranks = [one for one in measured if one.stage == stage]
    joined = Measured(
        stage,
        max(one.resident for one in ranks),
        max(one.peak for one in ranks),
        max(one.head for one in ranks),
        ranks[0].last,
        {chunk: max(one.under_way[chunk] for one in ranks) for chunk in ranks[0].under_way},
    )
    for key, costs in ranks[0].costs.items():
        others = [one.costs[key] for one in ranks]
        joined.costs[key] = Costs(
            costs.layers,
            {form: max(one.nbytes[form] for one in others) for form in costs.nbytes},
            {form: max(one.seconds[form] for one in others) for form in costs.seconds},
            max(one.moving for one in others),
        )
    return joined


def plan_of_stage(measured: Measured, budget: int, *, depth: int = 0) -> StagePlan | None:
    """Return the fastest plan of a stage within a budget; None where full recomputation needs more.

    Forms without both measurements are left out. What swapping holds on the device on its way (a layer that
    leaves, and ``depth`` that come back) counts once as soon as a layer swaps.

    Args:
        measured: of the stage, as `of_stage` joins it.
        budget: bytes of the device, resident ones included.
        depth: how many layers ahead of backward swapped tensors come back.
    """
    passing = (1 + depth) * max((costs.moving for costs in measured.costs.values()), default=0)
    plans = [_planned(measured, budget - measured.resident, passing=0)]
    if passing:
        plans.append(_planned(measured, budget - measured.resident, passing=passing))
    found = [plan for plan in plans if plan is not None]
    return min(found, key=lambda plan: plan.seconds, default=None)


def _planned(measured: Measured, room: int, *, passing: int) -> StagePlan | None:
    """Return the fastest plan whose peaks beyond resident bytes fit into ``room``.

    Full recomputation peaks in the backward pass of the last layer, where this layer has all that it ever
    keeps: beyond that peak count the other layers alone, and the last one for the other micro-batches that
    are under way. Before that pass, while the loss is computed, every layer counts. Where a rank has several
    chunks, each of them is the last one at some time, and every layer counts always.
    """
    keys = sorted(measured.costs)
    groups = [Group(measured.costs[key].layers, _forms(measured, key, swaps=passing > 0)) for key in keys]
    full = sum(costs.layers * costs.seconds[WHOLE] for costs in measured.costs.values())
    if len(measured.under_way) > 1 or not measured.last:
        plan = fastest_plan(groups, room - measured.peak - passing)
        if plan is None:
            return None
        names = [tuple(form.name for form in forms) for forms in plan.forms]
        return StagePlan(dict(zip(keys, names)), plan.nbytes + passing, plan.seconds, full)
    (chunk,) = measured.under_way
    last = keys.index((chunk, measured.last))
    under_way = measured.under_way[chunk]
    others = list(groups)
    others[last] = Group(groups[last].layers - 1, groups[last].forms)
    found = []
    for form in groups[last].forms:
        once = form.nbytes // under_way
        peaks = (measured.peak - once, measured.head)
        plan = fastest_plan(others, room - passing - max(peaks) - form.nbytes)
        if plan is not None:
            names = [tuple(one.name for one in forms) for forms in plan.forms]
            names[last] = (*names[last], form.name)
            nbytes = plan.nbytes + max(peaks) + form.nbytes - measured.peak + passing
            seconds = plan.seconds + form.seconds
            found.append(StagePlan(dict(zip(keys, names)), max(0, nbytes), seconds, full))
    return min(found, key=lambda plan: (plan.seconds, plan.nbytes), default=None)


def _forms(measured: Measured, key: tuple[int, str], *, swaps: bool) -> tuple[Form, ...]:
    costs, under_way = measured.costs[key], measured.under_way[key[0]]
    forms = [Form(WHOLE, 0, costs.seconds[WHOLE])]
    for name, nbytes in costs.nbytes.items():
        if name in costs.seconds and name != WHOLE and (swaps or name != SWAP):
            more = max(0, nbytes - costs.nbytes[WHOLE]) * under_way
            forms.append(Form(name, more, costs.seconds[name]))
    return tuple(forms)
