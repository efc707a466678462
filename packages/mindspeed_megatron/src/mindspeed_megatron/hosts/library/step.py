"""Default step of a library session: the caller's batch, forward step, loss and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import Batch, Loss, StepResult

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Run
    from mindspeed_megatron.hosts.library.session import LibrarySession


@hookimpl(trylast=True)
def get_batch(session: LibrarySession) -> Batch:
    """Return the caller's batch."""
    return session.given("get_batch")


@hookimpl(trylast=True)
def forward_step(
    session: LibrarySession,
    data_iterator: Iterator[Any],
    model_chunk: MegatronModule,
    return_schedule_plan: bool,
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Call the caller's function."""
    options = {"return_schedule_plan": True} if return_schedule_plan else {}
    return session.given("forward_step")(data_iterator, model_chunk, **options)


@hookimpl(trylast=True)
def compute_loss(session: LibrarySession, output_tensor: torch.Tensor) -> Loss:
    """Call the caller's loss function."""
    return session.given("compute_loss")(output_tensor)


@hookimpl(trylast=True)
def train_step(session: LibrarySession) -> StepResult:
    """Do the caller's step."""
    return session.given("train_step")()


@hookimpl(trylast=True)
def log_step(session: LibrarySession, run: Run) -> dict[str, Any]:
    """Join the caller's numbers and what features recorded since the last time."""
    numbers = {**session.given("log_step"), **run.metrics.reduce()}
    run.metrics.clear()
    return numbers
