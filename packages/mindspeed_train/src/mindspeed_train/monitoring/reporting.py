"""Default reporting: the numbers of a step, when a run stops, and what is left behind at its end."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_megatron.spared_failures import SparedFailures
from mindspeed_train.fault_tolerance.stopping import StopControl
from mindspeed_train.monitoring.measures import Measures

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import MemoryFigure
    from mindspeed_core.run import Run, StepResult
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def log_step(session: Session, run: Run, result: StepResult) -> dict[str, Any]:
    """Return the step's numbers under the names of ``metrics.jsonl``."""
    assert run.optimizer is not None
    losses = dict(result.losses)
    memory = _recent_peak(session)
    numbers: dict[str, Any] = {
        "step": run.iteration,
        "loss": losses.pop("lm loss", None),
        "learning_rate": max((group["lr"] for group in run.optimizer.param_groups), default=None),
        "grad_norm": result.grad_norm,
        "tokens_per_second": result.tokens / result.seconds if result.seconds else None,
        "step_ms": result.seconds * 1000.0,
        "peak_memory_bytes": memory.bytes,
        "memory_source": memory.source,
    }
    if result.skipped:
        numbers["skipped"] = True
    if result.num_zeros is not None:
        numbers["num_zeros"] = result.num_zeros
    numbers.update(losses)
    numbers.update(session.state(Measures).numbers(run, result))
    # Another rank may have recorded what this one has not; without features nobody records anything.
    if run.metrics.names() or (session.plan.features and run.dist.world_size > 1):
        numbers.update(run.metrics.reduce())
        run.metrics.clear()
    return numbers


@dataclass
class _PeakMemory:
    """The last figure the platform gave, and when."""

    figure: MemoryFigure | None = None
    taken: float = 0.0


def _recent_peak(session: Session) -> MemoryFigure:
    """Return the peak as of at most a second ago: asking the system costs a tenth of a short step."""
    now, peak = time.monotonic(), session.state(_PeakMemory)
    if peak.figure is None or now - peak.taken > 1.0:
        peak.figure, peak.taken = session.platform.peak_memory(), now
    return peak.figure


@hookimpl(trylast=True)
def should_stop(session: Session, run: Run) -> str:
    """Stop on a signal, at ``--exit-duration-in-mins`` or at ``--exit-interval``."""
    return session.state(StopControl).reason(run)


@hookimpl(trylast=True)
def finish_run(session: Session, run: Run) -> Done:
    """Draw the loss curve and write the summary on rank 0."""
    if run.dist.rank == 0 and run.run_dir is not None and _recorded(run):
        from mindspeed_train.monitoring import curves
        from mindspeed_train.monitoring.summary import write_summary

        with session.state(SparedFailures).spare(f"--run-dir {run.run_dir}"):
            if curves.wanted():
                curves.draw_loss_curve(run.history, run.run_dir / "loss_curve.png")
            write_summary(run)
    return DONE


def _recorded(run: Run) -> bool:
    """Return whether there are records; the run's folder may have been removed."""
    with suppress(OSError):
        return bool(run.history)
    return False
