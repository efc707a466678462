"""The parts of a step timed: megatron-core's timers, gathered over ranks at log steps.

megatron-core starts and stops timers around its own parts (``forward-backward``, ``all-grads-sync``,
``optimizer-inner-step``, ``forward-recv`` …); the host adds ``batch-generator`` and ``optimizer``. Level 1
lets ranks meet and the device finish before a part is timed; level 2 waits for the device at every transfer
and micro-batch too, so both slow a run down a little. Level 0 times nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from megatron.core.timers import Timers

from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.timer_events import listening

if TYPE_CHECKING:
    from mindspeed_core.run import Run

Times = dict[str, list[float]]


class StepTimers(Timers):
    """The times of a run's parts: one listener among those of megatron-core's timers."""

    def __init__(self, level: int) -> None:
        """Time parts up to a level; see ``--timing-log-level``."""
        super().__init__(level, "minmax")
        self.steps = 0

    def timer_started(self, name: str, level: int, barrier: bool) -> None:
        """Start a part's timer."""
        self(name, log_level=level).start(barrier=barrier)

    def timer_stopped(self, name: str, barrier: bool) -> None:
        """Stop a part's timer."""
        self(name).stop(barrier=barrier)

    @contextmanager
    def step(self, run: Run) -> Iterator[None]:
        """Time the parts of one training step, which is the body."""
        with listening(run, self):
            yield
        self.steps += 1

    def take(self) -> dict[str, float]:
        """Return milliseconds per step of each part on this rank since the last call."""
        steps, self.steps = max(1, self.steps), 0
        return {name: timer.elapsed(reset=True) * 1e3 / steps for name, timer in self._timers.items()}


@contextmanager
def untimed(run: Run) -> Iterator[None]:
    """Time nothing in the body: validation is not part of a step."""
    timers, run.config.timers = run.config.timers, None
    try:
        yield
    finally:
        run.config.timers = timers


@contextmanager
def timed(run: Run, name: str, level: int) -> Iterator[None]:
    """Time the body as a part of the step, where the level asks for it."""
    if run.config.timers is None:
        yield
        return
    timer = run.config.timers(name, log_level=level)
    timer.start(barrier=run.config.barrier_with_L1_time and level == 1)
    try:
        yield
    finally:
        timer.stop()


def gather_times(timers: StepTimers) -> Times:
    """Return milliseconds per step of every part since the last call, by rank. Collective.

    Ranks that did not run a part (a first stage receives nothing) have no entry in its list.
    """
    return merge_times(all_gather_values(timers.take()))


def merge_times(parts: Sequence[Mapping[str, float]]) -> Times:
    """Merge the times of all ranks by part; parts that took no time on a rank are left out there."""
    merged: Times = {}
    for part in parts:
        for name, milliseconds in part.items():
            if milliseconds > 0.0:
                merged.setdefault(name, []).append(milliseconds)
    return merged


def reported_times(times: Times, option: str) -> dict[str, Any]:
    """Select times by ``--timing-log-option``: a number, ``{"min": …, "max": …}``, or a list over ranks."""
    if option == "max":
        return {name: max(values) for name, values in times.items()}
    if option == "minmax":
        return {name: {"min": min(values), "max": max(values)} for name, values in times.items()}
    return dict(times)


def time_lines(reported: Mapping[str, Any]) -> list[str]:
    """Format the times as lines, the longest part first."""
    rows = sorted(reported.items(), key=lambda row: -slowest(row[1]))
    width = max((len(name) for name, _ in rows), default=0)
    return ["ms per step:", *(f"    {name:<{width}}  {_shown(value)}" for name, value in rows)]


def slowest(value: Any) -> float:
    """Return the slowest rank's time of a part in the form of `reported_times`."""
    if isinstance(value, Mapping):
        return float(value["max"])
    return float(max(value)) if isinstance(value, list) else float(value)


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['min']:.2f} to {value['max']:.2f}"
    return "  ".join(f"{each:.2f}" for each in value) if isinstance(value, list) else f"{value:.2f}"
