"""Stages around the training loop: logging, evaluation, stopping and the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import Done, hookspec

if TYPE_CHECKING:
    from mindspeed_core.run import Run, StepResult
    from mindspeed_core.session import Session

__all__ = ["evaluate", "finish_run", "log_step", "should_stop", "start_run"]


@hookspec
def start_run(session: Session, run: Run) -> Done | Any:
    """Start the run: everything is built and loaded, the first step comes next. Parameters are complete."""


@hookspec
def log_step(session: Session, run: Run, result: StepResult) -> dict[str, Any] | Any:
    """Collect the numbers of a step; called on every rank, each ``--log-interval`` steps.

    What features recorded with ``run.metrics`` is already reduced over ranks and included. A feature that
    reads parameters here calls ``run.complete_parameters()`` first.

    Args:
        result: what `train_step` returned.

    Returns:
        The numbers by name; rank 0 prints and writes them.
    """


@hookspec
def evaluate(session: Session, run: Run, split: str) -> dict[str, float] | Any:
    """Compute the mean loss over ``--eval-iters`` batches of ``"valid"`` or ``"test"``.

    Parameters are complete, and stay as a wrapper sets them until it sets them back.

    Args:
        split: ``"valid"`` or ``"test"``.
    """


@hookspec
def should_stop(session: Session, run: Run) -> str | Any:
    """Return why the run should end before its last step, or an empty string; the same on every rank.

    A feature that reads parameters here calls ``run.complete_parameters()`` first.
    """


@hookspec
def finish_run(session: Session, run: Run) -> Done | Any:
    """End the run: close files, draw the loss curve. Called even when the run failed.

    Parameters are complete where the run did not fail; in a library session a feature that reads them calls
    ``run.complete_parameters()`` after its last step.
    """
