"""The course of a schedule in time: when each action runs, what is idle, what is kept, what is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from mindspeed_pp.actions import (
    BACKWARD,
    COMPUTING,
    FORWARD,
    INPUT_GRADIENT,
    RECOMPUTE,
    REDUCE,
    SWAP_IN,
    SWAP_OUT,
    WEIGHT_GRADIENT,
    Action,
)
from mindspeed_pp.schedule import Result, Schedule, needs, provides


@dataclass(frozen=True)
class Costs:
    """Times of the parts of a step, in any one unit.

    Attributes:
        forward: of one rank's whole share of the layers and one micro-batch; a chunk costs its part of it.
        input_gradient: likewise.
        weight_gradient: likewise.
        stages: of each stage ``(F, B, W)``, in place of the three above.
        message: from the end of an action to the arrival of what it sends to another rank.
        overhead: of every action.
        paired: of a forward beside a backward pass, as a part of their sum.
        reduction: of the gradients of one chunk, beside computation.
        swap: of a micro-batch's way to the host, or back, beside computation.
        sizes: of the micro-batches, as multiples of the usual one; empty where all have the usual size.
        kept_to_input_gradient: of a micro-batch's activations, what goes with ``B``.
        kept_to_weight_gradient: what goes with ``W``.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    stages: tuple[tuple[float, float, float], ...] = ()
    message: float = 0.0
    overhead: float = 0.0
    paired: float = 1.0
    reduction: float = 0.0
    swap: float = 0.0
    sizes: tuple[float, ...] = ()
    kept_to_input_gradient: float = 0.0
    kept_to_weight_gradient: float = 1.0

    def of(self, action: Action, chunks: int) -> float:
        """Return the time of an action on a rank with so many chunks."""
        if action.parts:
            return (
                self.paired * sum(self.of(part, chunks) - self.overhead for part in action.parts)
                + self.overhead
            )
        if action.op not in COMPUTING:
            return 0.0
        f, b, w = (
            self.stages[action.stage]
            if self.stages
            else tuple(x / chunks for x in (self.forward, self.input_gradient, self.weight_gradient))
        )
        time = {FORWARD: f, RECOMPUTE: f, INPUT_GRADIENT: b, BACKWARD: b + w}.get(action.op, w)
        return time * (self.sizes[action.microbatch] if self.sizes else 1.0) + self.overhead


@dataclass(frozen=True)
class Span:
    """An action in time.

    Attributes:
        rank: that executes it.
        action: executed.
        start: when it begins.
        end: when it is done.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Course:
    """Course of a simulated step.

    Attributes:
        schedule: that was run.
        makespan: from the first start to the end of the last computation.
        step: the same with the reductions of gradients that computation does not cover.
        busy: time of all actions of each rank.
        bubble: the makespan without the time of the busiest rank.
        span_bubble: the longest time from a rank's first to its last action, without the busiest rank's.
        peaks: largest number of micro-batches alive on each rank, in units of its whole share.
        exposed_communication: of the makespan, what would go if messages took no time.
        spans: every action in time, rank by rank.
    """

    schedule: Schedule
    makespan: float
    step: float
    busy: tuple[float, ...]
    bubble: float
    span_bubble: float
    peaks: tuple[float, ...]
    exposed_communication: float
    spans: tuple[Span, ...] = field(repr=False)

    @property
    def bubble_share(self) -> float:
        """Return the bubble as a part of the makespan."""
        return self.bubble / self.makespan if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Course:
    """Run a schedule that passed `mindspeed_pp.lint.lint`.

    Args:
        schedule: to run.
        costs: of its parts.
    """
    spans = _run(schedule, costs)
    exposed = 0.0
    if costs.message:
        plain = _run(schedule, replace(costs, message=0.0))
        exposed = max(span.end for span in spans) - max(span.end for span in plain)
    return course_of(schedule, spans, costs, exposed)


def course_of(
    schedule: Schedule, spans: Sequence[Span], costs: Costs = Costs(), exposed: float = 0.0
) -> Course:
    """Return what a step looks like whose actions ran at given times, the first one at 0.

    Args:
        schedule: that ran.
        spans: of all actions.
        costs: of what spans do not say, memory and the reduction of gradients.
        exposed: part of the makespan that messages make.
    """
    makespan = max(span.end for span in spans)
    ranks = [[span for span in spans if span.rank == rank] for rank in range(schedule.ranks)]
    busy = tuple(sum(span.end - span.start for span in held) for held in ranks)
    longest = max(max(s.end for s in held) - min(s.start for s in held) for held in ranks)
    return Course(
        schedule=schedule,
        makespan=makespan,
        step=_reduced(schedule, spans, costs),
        busy=busy,
        bubble=makespan - max(busy),
        span_bubble=longest - max(busy),
        peaks=tuple(_peak(schedule, rank, costs) for rank in range(schedule.ranks)),
        exposed_communication=exposed,
        spans=tuple(sorted(spans, key=lambda span: (span.rank, span.start))),
    )


def _run(schedule: Schedule, costs: Costs) -> list[Span]:
    ranks = schedule.placement.ranks
    # Pairs that cost what their parts cost are run one part after the other, as the executor does.
    orders = schedule.orders
    if costs.paired == 1.0:
        orders = tuple(tuple(part for action in order for part in action.flat()) for order in orders)
    done: dict[Result, float] = {}
    free, at = [0.0] * schedule.ranks, [0] * schedule.ranks
    spans: list[Span] = []

    def ready(rank: int) -> float | None:
        action = orders[rank][at[rank]]
        made = {result for part in action.flat() for result in provides(part)}
        start = free[rank]
        for part in action.flat():
            for need in needs(part, schedule):
                if need in made:
                    continue
                if need not in done:
                    return None
                away = costs.message if ranks[need[1]] != rank else 0.0
                start = max(start, done[need] + away)
        return start

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and (start := ready(rank)) is not None:
                action = order[at[rank]]
                end = start + costs.of(action, schedule.placement.parts(rank))
                spans.append(Span(rank, action, start, end))
                available = end + (costs.swap if action.op in (SWAP_OUT, SWAP_IN) else 0.0)
                done.update(dict.fromkeys((r for p in action.flat() for r in provides(p)), available))
                free[rank] = end
                at[rank] += 1
                moved = True
    return spans


def _reduced(schedule: Schedule, spans: Sequence[Span], costs: Costs) -> float:
    """Return the end of the step: one reduction after another on each rank, from a chunk's last gradient."""
    ends = [max(span.end for span in spans)]
    if not costs.reduction:
        return ends[0]
    for rank in range(schedule.ranks):
        last: dict[int, float] = {}
        for span in spans:
            if span.rank == rank:
                for part in span.action.flat():
                    if part.op in (BACKWARD, WEIGHT_GRADIENT, REDUCE):
                        last[part.stage] = max(last.get(part.stage, 0.0), span.end)
        clock = 0.0
        for ready in sorted(last.values()):
            clock = max(clock, ready) + costs.reduction
        ends.append(clock)
    return max(ends)


def _peak(schedule: Schedule, rank: int, costs: Costs) -> float:
    share = 1 / schedule.placement.parts(rank)
    size: Callable[[int], float] = lambda i: costs.sizes[i] if costs.sizes else 1.0  # noqa: E731
    early, late = costs.kept_to_input_gradient, costs.kept_to_weight_gradient
    alive = peak = 0.0
    for action in schedule.orders[rank]:
        for part in action.flat():
            amount = share * size(part.microbatch)
            again = (part.stage, part.microbatch) in schedule.recomputed
            if part.op == RECOMPUTE or (part.op == FORWARD and not again):
                alive += (early + late) * amount
            peak = max(peak, alive)
            if part.op in (INPUT_GRADIENT, BACKWARD):
                alive -= early * amount
            if part.op in (WEIGHT_GRADIENT, BACKWARD):
                alive -= late * amount
            if part.op in (SWAP_OUT, SWAP_IN):
                before = schedule.swapped[part.stage, part.microbatch] == INPUT_GRADIENT
                gone = (early + late if before else late) * amount
                alive += gone if part.op == SWAP_IN else -gone
                peak = max(peak, alive)
    return round(peak, 9)
