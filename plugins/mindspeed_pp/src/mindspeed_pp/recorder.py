"""Measure the actions of real batches: when each ran, what it waited for, what the simulator says to it."""

from __future__ import annotations

import json
import logging
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed_core.errors import UserError
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.earlier_files import move_aside
from mindspeed_pp.channels import Message, received, sent
from mindspeed_pp.schedule import Schedule
from mindspeed_pp.simulator import Costs, Course, Span, course_of, simulate
from mindspeed_pp.stage_times import KEY, Measured, as_record, times_of_spans
from mindspeed_pp.timeline import trace

logger = logging.getLogger("mindspeed_core")

UNMEASURED = 1
"""Batches before the measured ones: kernels are loaded and communicators connected there."""


@dataclass
class Recorder:
    """The clock of one rank in one batch; the device ends its work before every reading.

    Attributes:
        spans: item, begin of its computation and its end, in seconds since all ranks of the pipeline began.
        waited: whether a message was waited for, and when it arrived.
    """

    platform: Any
    spans: list[tuple[int, float, float]] = field(default_factory=list)
    waited: dict[Message, tuple[float, float]] = field(default_factory=dict)
    _zero: float = 0.0
    _begun: float = 0.0

    def start(self, group: Any) -> None:
        """Begin when all ranks of the pipeline do."""
        self.platform.synchronize()
        dist.barrier(group=group)
        self._zero = time.perf_counter()

    def begin(self) -> None:
        """Begin an action."""
        self._begun = self._now()

    def arrived(self, message: Message) -> None:
        """Say that a message is there; what the action did so far was waiting."""
        now = self._now()
        self.waited[message] = (self._begun, now)
        self._begun = now

    def end(self, item: int) -> None:
        """End an action."""
        self.spans.append((item, self._begun, self._now()))

    def _now(self) -> float:
        self.platform.synchronize()
        return time.perf_counter() - self._zero


Batch = tuple[list[tuple[int, float, float]], dict[Message, tuple[float, float]]]


@dataclass(frozen=True)
class Profile:
    """Times of several batches on all ranks of one pipeline.

    Attributes:
        measured: times of stages and messages.
        course: the batch of median length, as the simulator would return it.
        simulated: what the simulator makes of the measured times.
    """

    measured: Measured
    course: Course
    simulated: Course

    def sentence(self) -> str:
        """Return both lengths."""
        real, said = self.course.makespan, self.simulated.makespan
        bubbles, name = (self.course.bubble_share, self.simulated.bubble_share), self.course.schedule.name
        return (
            f"schedule {name}: a batch took {real * 1e3:.2f} ms, bubble {bubbles[0]:.1%}; "
            f"the simulator says {said * 1e3:.2f} ms ({said / real - 1:+.1%}), bubble {bubbles[1]:.1%}"
        )


def gathered(batches: list[Batch], schedule: Schedule, pg: Any, layers: int | None) -> Profile:
    """Return what was measured, the same on every rank of the world; collective over all of them.

    Args:
        batches: of this rank.
        schedule: that ran in all of them.
        pg: the process groups.
        layers: of the model.
    """
    ranks = dist.get_process_group_ranks(pg.pp)
    everyones = all_gather_values((pg.pp.rank(), tuple(ranks), batches))
    first = min(pipeline for _, pipeline, _ in everyones)
    by_rank = {rank: theirs for rank, pipeline, theirs in everyones if pipeline == first}
    spans = [
        (action.op, schedule.placement.position(action.stage), end - start)
        for rank, _, theirs in everyones
        for items, _ in theirs
        for item, start, end in items
        if not (action := schedule.orders[rank][item]).parts
    ]
    count = len(batches)
    courses = [_course(schedule, {rank: theirs[i] for rank, theirs in by_rank.items()}) for i in range(count)]
    middle = sorted(courses, key=lambda course: course.makespan)[count // 2]
    messages = [
        delay for i in range(count) for delay in _delays(schedule, {r: b[i] for r, b in by_rank.items()})
    ]
    message = statistics.median(messages) if messages else 0.0
    measured = Measured(times_of_spans(spans, schedule.placement.depth), message, layers)
    costs = Costs(stages=measured.of_stages(schedule.placement), message=message)
    return Profile(measured, middle, simulate(schedule, costs))


def _course(schedule: Schedule, batch: dict[int, Batch]) -> Course:
    spans = [
        Span(rank, schedule.orders[rank][item], start, end)
        for rank, (items, _) in sorted(batch.items())
        for item, start, end in items
    ]
    begin = min(span.start for span in spans)
    return course_of(schedule, [Span(s.rank, s.action, s.start - begin, s.end - begin) for s in spans])


def _delays(schedule: Schedule, batch: dict[int, Batch]) -> list[float]:
    """Return how long messages travelled that somebody waited for all the way."""
    ends = {
        message: end
        for rank, (items, _) in batch.items()
        for item, _, end in items
        for message, _ in sent(schedule.orders[rank][item], schedule)
    }
    found = []
    for rank, (items, waited) in batch.items():
        for item, _, _ in items:
            for message, _ in received(schedule.orders[rank][item], schedule):
                since, arrived = waited[message]
                if since <= ends[message]:
                    found.append(max(0.0, arrived - ends[message]))
    return found


def write_profile(profile: Profile, path: Path) -> None:
    """Write the timeline of a batch and the simulator's, for Perfetto, and the times, for `read_times`.

    Raises:
        UserError: the file cannot be written.
    """
    events = [
        *trace(profile.course, unit=1e6, process=0, title="measured")["traceEvents"],
        *trace(profile.simulated, unit=1e6, process=1, title="simulated with measured times")["traceEvents"],
    ]
    record = {"traceEvents": events, "displayTimeUnit": "ms", KEY: as_record(profile.measured)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        move_aside(path.parent, [path.name])
        path.write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--profile-pipeline {path}: {error.strerror}; name a file that can be written"
        ) from error
