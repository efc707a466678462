"""Start and stop of the profiler at the chosen steps of a run.

A profiler is stopped exactly once whatever happens: a trace that was begun is written even when the run ends
or fails within the recorded steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from mindspeed_profile.options import ProfileOptions


class Profiler(Protocol):
    """The common interface of `torch.profiler.profile` and its NPU counterpart."""

    def start(self) -> Any:
        """Start recording."""

    def step(self) -> Any:
        """Mark the end of a step."""

    def stop(self) -> Any:
        """Stop; a recorded trace is written."""


class StepRecorder:
    """Records steps ``[start, end)``, with one step before them to warm the profiler up where there is one.

    Attributes:
        options: the flags.
    """

    def __init__(self, options: ProfileOptions, make: Callable[[int, int, int], Profiler]) -> None:
        """Keep the options; nothing starts before `before_step`.

        ``make`` builds the profiler from the number of warm-up steps, and the first step that is recorded
        and the first that no longer is.
        """
        self.options = options
        self._make = make
        self._profiler: Profiler | None = None
        self._recorded_from = -1

    def recording(self, iteration: int) -> bool:
        """Return whether the step is being recorded, rather than warmed up for or passed over."""
        return self._profiler is not None and iteration >= self._recorded_from

    def before_step(self, iteration: int) -> None:
        """Start the profiler when the coming step, counted over the whole training, is its first."""
        start, end = self.options.start, self.options.end
        if self._profiler is not None or not start - 1 <= iteration < end:
            return
        self._recorded_from = max(start, iteration)
        self._profiler = self._make(self._recorded_from - iteration, self._recorded_from, end)
        self._profiler.start()

    def after_step(self, iteration: int) -> None:
        """Mark the end of a step, and stop the profiler after the last one."""
        if self._profiler is None:
            return
        self._profiler.step()
        if iteration + 1 >= self.options.end:
            self.close()

    def close(self) -> None:
        """Stop the profiler if it runs; what was recorded so far is written."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
