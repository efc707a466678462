"""Timeline of a pipeline's step: when each stage runs each micro-batch, and when it waits.

Every stage runs its own order; a forward pass waits for the one of the stage before, a backward pass for the
one of the stage behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_tune.schedules import BACKWARD, FORWARD, Step


@dataclass(frozen=True)
class Span:
    """One pass of a chunk over a micro-batch, in seconds from the start of the step."""

    stage: int
    direction: str
    chunk: int
    microbatch: int
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The passes of all stages of one step.

    Attributes:
        spans: by stage, then in order of time.
        seconds: from the first begin to the last end.
        stages: number of pipeline stages.
    """

    spans: tuple[Span, ...]
    seconds: float
    stages: int

    def busy(self, stage: int) -> float:
        """Return the seconds in which a stage runs."""
        return sum(span.end - span.begin for span in self.spans if span.stage == stage)

    @property
    def bubble(self) -> float:
        """Return the share of all stages' time in which they wait."""
        if not self.seconds:
            return 0.0
        total = sum(span.end - span.begin for span in self.spans)
        return 1.0 - total / (self.seconds * self.stages)


class Blocked(ValueError):
    """The orders of the stages wait for each other; the message names a stage and what it waits for."""


def simulate(
    orders: Sequence[Sequence[Step]],
    durations: Sequence[Mapping[tuple[str, int], float]],
    transfer: float = 0.0,
) -> Timeline:
    """Run the orders of all stages against each other.

    Args:
        orders: what every stage runs, in order.
        durations: of every stage, seconds by direction and chunk.
        transfer: seconds between the end of a pass and the begin of the one that waits for it elsewhere.

    Raises:
        Blocked: no stage can go on.
    """
    stages = len(orders)
    chunks = 1 + max((chunk for order in orders for _, chunk, _ in order), default=0)
    ended: dict[tuple[str, int, int], float] = {}
    position, clock = [0] * stages, [0.0] * stages
    spans: list[list[Span]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                direction, chunk, microbatch = order[position[stage]]
                begin = _ready(ended, stages, chunks, stage, order[position[stage]], transfer)
                if begin is None:
                    break
                begin = max(begin, clock[stage])
                end = begin + durations[stage][direction, chunk]
                ended[direction, chunk * stages + stage, microbatch] = clock[stage] = end
                spans[stage].append(Span(stage, direction, chunk, microbatch, begin, end))
                position[stage] += 1
                moved = True
    for stage, order in enumerate(orders):
        if position[stage] < len(order):
            direction, chunk, microbatch = order[position[stage]]
            raise Blocked(
                f"pipeline stage {stage} waits for ever for the {direction} pass of micro-batch {microbatch} "
                f"of its chunk {chunk}"
            )
    return Timeline(tuple(span for found in spans for span in found), max(clock, default=0.0), stages)


def _ready(
    ended: Mapping[tuple[str, int, int], float],
    stages: int,
    chunks: int,
    stage: int,
    step: Step,
    transfer: float,
) -> float | None:
    """Return when the input of a pass is there; None while nobody knows."""
    direction, chunk, microbatch = step
    here = chunk * stages + stage
    if direction == FORWARD:
        if here == 0:
            return 0.0
        before = ended.get((FORWARD, here - 1, microbatch))
    elif here == stages * chunks - 1:
        return ended.get((FORWARD, here, microbatch))
    else:
        before = ended.get((BACKWARD, here + 1, microbatch))
    if before is None:
        return None
    # Without a pipeline the next chunk is on the same rank.
    return before + (transfer if stages > 1 else 0.0)
