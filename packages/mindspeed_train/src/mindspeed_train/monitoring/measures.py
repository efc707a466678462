"""Measurements beside the losses: throughput, forward times of ranks, parts of a step.

One record per session holds what they need; ``log_step`` asks it for its numbers, on every rank.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed_core.runtime.metrics import report_lines
from mindspeed_megatron.padding import StepLengths
from mindspeed_megatron.parameter_norm import parameter_norm
from mindspeed_train.monitoring.straggler import (
    ForwardClock,
    straggler_line,
    straggler_report,
)
from mindspeed_train.monitoring.throughput import Throughput, measure_throughput
from mindspeed_train.monitoring.timing import (
    StepTimers,
    gather_times,
    reported_times,
    time_lines,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mindspeed_core.run import Run, StepResult


class EnergyMeter:
    """The energy of the devices of all ranks between two log lines."""

    def __init__(self, run: Run) -> None:
        """Begin to measure."""
        self._step = run.iteration
        self._joules = run.session.platform.energy()
        self._time = time.monotonic()

    def figures(self, run: Run) -> dict[str, float]:
        """Return ``energy_joules_per_step`` and ``power_watts``, means over the ranks whose device tells.

        Collective. Nothing where no device tells.
        """
        joules, now = run.session.platform.energy(), time.monotonic()
        steps, seconds = run.iteration - self._step, now - self._time
        known = joules is not None and self._joules is not None and steps > 0 and seconds > 0
        used = (joules or 0.0) - (self._joules or 0.0) if known else 0.0
        self._step, self._joules, self._time = run.iteration, joules, now
        sums = torch.tensor(
            [used / steps if known else 0.0, used / seconds if known else 0.0, float(known)],
            dtype=torch.float32,
            device=run.dist.device,
        )
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(sums)
        per_step, watts, telling = sums.tolist()
        if not telling:
            return {}
        return {"energy_joules_per_step": per_step / telling, "power_watts": watts / telling}


class Measures:
    """The measurements that the arguments ask for; none before `start`."""

    throughput: Throughput | None = None
    clock: ForwardClock | None = None
    energy: EnergyMeter | None = None
    timers: StepTimers | None = None

    def start(self, run: Run) -> None:
        """Prepare what ``--log-throughput``, ``--log-straggler``, … and ``--timing-log-level`` need."""
        self.throughput = measure_throughput(run) if run.args.log_throughput else None
        self.clock = ForwardClock(run.session.platform) if run.args.log_straggler else None
        self.energy = EnergyMeter(run) if run.args.log_energy else None
        level = run.args.timing_log_level
        self.timers = StepTimers(level) if level else None

    def step(self, run: Run) -> AbstractContextManager[Any]:
        """Return a context that measures one training step."""
        return nullcontext() if self.timers is None else self.timers.step(run)

    def forward(self) -> AbstractContextManager[Any]:
        """Return a context that measures one forward pass of a micro-batch."""
        return nullcontext() if self.clock is None else self.clock

    def numbers(self, run: Run, result: StepResult) -> dict[str, Any]:
        """Return the numbers of a logged step. Collective.

        Keys: those of `Throughput.figures`, `compare_ranks` and `EnergyMeter.figures`, ``params_norm``, and
        ``timing_ms`` with the parts of a step under ``--timing-log-option``.
        """
        found: dict[str, Any] = {}
        if self.throughput is not None:
            samples, work = result.tokens // run.args.seq_length, run.session.state(StepLengths).work
            found.update(self.throughput.figures(samples, result.seconds, run.dist.world_size, work))
        if self.clock is not None:
            found.update(straggler_report(run, self.clock))
        if self.energy is not None:
            found.update(self.energy.figures(run))
        if run.args.log_params_norm:
            run.complete_parameters()
            found["params_norm"] = float(parameter_norm(run))
        times = gather_times(self.timers) if self.timers is not None else {}
        if times:
            found["timing_ms"] = reported_times(times, run.args.timing_log_option)
        return found


def detail_lines(numbers: Mapping[str, Any]) -> list[str]:
    """Format what is printed below the line of a step."""
    lines = []
    if "straggler_ranks" in numbers:
        lines.append(straggler_line(numbers))
    if "timing_ms" in numbers:
        lines += time_lines(numbers["timing_ms"])
    return lines + report_lines(numbers)
