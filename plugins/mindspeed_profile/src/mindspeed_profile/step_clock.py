"""The time of a step divided among what it is spent on, each moment once.

At every change an event is recorded in the current stream, so that on a device the times are the device's: a
wait takes as long as the stream stands still for it, which is communication that nothing hides. Where parts
lie inside of others (a wait inside the update) the inner one counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_core.runtime.metrics import Report
from mindspeed_megatron.instruments.communication import Call
from mindspeed_megatron.instruments.communication_events import CommunicationEvents
from mindspeed_megatron.timer_events import listening

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

COMPUTE, DATA, GRADIENTS, OPTIMIZER = "compute", "data", "gradients", "optimizer"
WAITING = "waiting "
"""Begins the name of the time in which a group is waited for."""


class StepClock:
    """Times of this rank since the last report; hears of megatron-core's timers and of waits."""

    def __init__(self, platform: Platform) -> None:
        """Begin with nothing measured."""
        self._platform = platform
        self._parts: list[str] = []
        self._changes: list[tuple[Any, str]] = []
        self._milliseconds: Counter[str] = Counter()
        self._steps = 0

    @contextmanager
    def step(self, session: Session, run: Run) -> Iterator[None]:
        """Divide the time of the body, which is one training step."""
        self._platform.synchronize()
        self._changes, self._parts = [], [COMPUTE]
        self._record()
        try:
            with listening(run, self), session.state(CommunicationEvents).listening(self, session.at_close):
                yield
        finally:
            self._parts = []
        self._record()
        self._platform.synchronize()
        for (start, part), (end, _) in zip(self._changes, self._changes[1:]):
            # Two streams may have recorded them in the other order.
            self._milliseconds[part] += max(0.0, start.elapsed_time(end))
        self._changes = []
        self._steps += 1

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the body's time under a name, where a step is under way."""
        if not self._parts:
            yield
            return
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def timer_started(self, name: str, level: int, barrier: bool) -> None:
        """Enter the part that a timer of megatron-core stands for."""
        if self._parts and part_of_timer(name):
            self._enter(part_of_timer(name))

    def timer_stopped(self, name: str, barrier: bool) -> None:
        """Leave it."""
        if self._parts and part_of_timer(name):
            self._leave()

    def call_made(self, call: Call) -> None:
        """Take no notice: a call costs nothing before it is waited for."""

    def wait_started(self, call: Call) -> None:
        """Enter the waiting for a group."""
        if self._parts and len(call.ranks) > 1:
            self._enter(WAITING + call.group)

    def wait_stopped(self, call: Call) -> None:
        """Leave it."""
        if self._parts and len(call.ranks) > 1:
            self._leave()

    def report(self) -> Report:
        """Return the mean milliseconds of a step since the last report; collective over all ranks.

        Returns:
            For each part the times of the rank with least and with most of it.
        """
        steps = max(1, self._steps)
        own = {part: milliseconds / steps for part, milliseconds in self._milliseconds.items()}
        self._milliseconds.clear()
        self._steps = 0
        values = spread(all_gather_values(own))
        return Report(values, lines(values))

    def _enter(self, part: str) -> None:
        self._parts.append(part)
        self._record()

    def _leave(self) -> None:
        self._parts.pop()
        self._record()

    def _record(self) -> None:
        event = self._platform.event(enable_timing=True)
        event.record()
        self._changes.append((event, self._parts[-1] if self._parts else ""))


def part_of_timer(name: str) -> str:
    """Return what a timer of megatron-core is part of; empty for what counts as computing."""
    if name.startswith("optimizer") or name == "params-all-gather":
        return OPTIMIZER
    if name == "all-grads-sync" or name.endswith("-grads-all-reduce"):
        return GRADIENTS
    return DATA if name == "batch-generator" else ""


def spread(ranks: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the least and the most of all ranks for each part, in which a rank without it has none."""
    names = sorted(
        {name for rank in ranks for name in rank}, key=lambda name: (name.startswith(WAITING), name)
    )
    return {
        name: {
            "min": min(rank.get(name, 0.0) for rank in ranks),
            "max": max(rank.get(name, 0.0) for rank in ranks),
        }
        for name in names
    }


def lines(values: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each part, under a heading."""
    width = max((len(name) for name in values), default=0)
    rows = (f"    {name:<{width}}  {one['min']:.2f} to {one['max']:.2f}" for name, one in values.items())
    return ["ms of a step, ranks with least and most:", *rows]
