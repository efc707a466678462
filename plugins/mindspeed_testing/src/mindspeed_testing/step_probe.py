"""Measurements of single steps of a training in a proof."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mindspeed_core.feature import hookimpl
from mindspeed_testing.gloo_threads import released_when_waited
from mindspeed_train.interface import batch_at

if TYPE_CHECKING:
    from mindspeed_core.run import OptimizerStep, Run
    from mindspeed_megatron.instruments.communication import Total
    from mindspeed_megatron.instruments.host_buffers import HostBuffers
    from mindspeed_megatron.instruments.memory import TensorBytes
    from mindspeed_testing.canonical import CanonicalState


@dataclass(frozen=True)
class Measured:
    """Memory, communication and time of one more step."""

    measures: Mapping[str, float] = field(default_factory=dict)
    communication: Mapping[tuple[str, str], Total] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class StepProbe:
    """Takes what a step holds right before its update: gradients, learning rates, the memory peak so far."""

    def __init__(self) -> None:
        """Record nothing until `begin`."""
        self.gradients: list[CanonicalState] = []
        self.learning_rates: list[tuple[float, ...]] = []
        self.tracker: TensorBytes | None = None
        self.peak = self.after_forward = 0
        self._records = self._with_gradients = False

    def begin(self, gradients: bool) -> None:
        """Record the steps from now on."""
        self._records, self._with_gradients = True, gradients

    def end(self) -> None:
        """Record no further step."""
        self._records = False

    @hookimpl(wrapper=True)
    def forward_step(self) -> Iterator[None]:
        """Read after a forward pass."""
        result = yield
        if self.tracker is not None:
            # Cycles that nobody needs are alive until Python looks for them, whenever that is.
            gc.collect()
            self.after_forward = max(self.after_forward, self.tracker.alive)
        return result

    @hookimpl(wrapper=True)
    def optimizer_step(self, run: Run) -> Iterator[None]:
        """Read before the update."""
        if self.tracker is not None:
            self.peak = self.tracker.peak
        if self._records:
            groups = getattr(run.optimizer, "param_groups", ())
            self.learning_rates.append(tuple(sorted({float(group["lr"]) for group in groups})))
        if self._records and self._with_gradients:
            from mindspeed_testing.canonical import canonical_gradients

            state = canonical_gradients(run)
            if state is not None:
                self.gradients.append(state)
        result: OptimizerStep = yield  # type: ignore[assignment]
        return result  # type: ignore[return-value]


class Steps:
    """Steps a run as the host's own loop does."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def once(self) -> _Timed:
        """Time one step of the run."""
        run = self.run
        started = time.perf_counter()
        result = run.session.call("train_step", run=run)
        seconds = time.perf_counter() - started
        run.iteration += 1
        run.consumed_train_samples += batch_at(run.args, run.consumed_train_samples).samples
        return _Timed(dict(result.losses), result.grad_norm, seconds)

    def save(self) -> None:
        """Save a checkpoint as the end of a run does: complete, before anything else happens."""
        self.run.complete_parameters()
        self.run.session.call("save_checkpoint", run=self.run, reason="end")


@dataclass(frozen=True)
class _Timed:
    losses: Mapping[str, float]
    grad_norm: float | None
    seconds: float


def measure(run: Run, steps: Steps, probe: StepProbe, buffers: HostBuffers) -> Measured:
    """Measure memory and communication of one more step."""
    from mindspeed_megatron.instruments.communication import COLLECTIVES, count_communication
    from mindspeed_megatron.instruments.kept_state import state_bytes
    from mindspeed_megatron.instruments.memory import TensorBytes

    run.metrics.clear()
    made = buffers.made
    with ExitStack() as stack:
        stack.enter_context(released_when_waited())
        log = stack.enter_context(count_communication())
        tracker = stack.enter_context(TensorBytes())
        probe.tracker = tracker
        steps.once()
        probe.tracker = None
    measures: dict[str, float] = {
        "peak_bytes": probe.peak,
        "forward_bytes": probe.after_forward,
        "step_peak_bytes": tracker.peak,
        "host_bytes": buffers.alive,
        "host_buffers": buffers.made - made,
        "sent_bytes": log.sent_bytes(),
        "collective_calls": sum(call.operation in COLLECTIVES for call in log.calls),
        **state_bytes(run),
    }
    return Measured(measures, log.table(), run.metrics.reduce())
