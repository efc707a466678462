"""Stages of one training step: the schedule, and the forward pass and loss of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Batch, Loss, Run, StepResult
    from mindspeed_core.session import Session

__all__ = ["compute_loss", "forward_step", "get_forward_backward", "train_step"]


@hookspec
def get_forward_backward(
    session: Session, args: Namespace, config: TransformerConfig, pg: ProcessGroupCollection
) -> Callable[..., Any] | Any:
    """Return the pipeline schedule: a callable with megatron-core's forward-backward signature.

    Slot ``pipeline-schedule``. Called once per run; evaluation uses the same schedule with ``forward_only``.
    """


@hookspec
def train_step(session: Session, run: Run) -> StepResult | Any:
    """Do one training step: zero the gradients, run the schedule, update, reduce the losses.

    There are no begin-step and end-step stages: wrap this one. A wrapper that reads parameters after its
    ``yield`` calls ``run.complete_parameters()`` first.
    ``session.default("train_step", run=run)`` calls the host's own again.
    """


@hookspec
def forward_step(
    session: Session,
    run: Run,
    data_iterator: Iterator[Any],
    model_chunk: MegatronModule,
    return_schedule_plan: bool,
) -> tuple[torch.Tensor, Callable[..., Any]] | Any:
    """Run one micro-batch through one chunk; called by the schedule.

    ``run.context`` holds the current micro-batch and chunk.

    Args:
        data_iterator: the chunk's iterator.
        return_schedule_plan: return the plan of the forward pass instead of running it.

    Returns:
        The chunk's output and the loss function that the schedule applies to it on the last pipeline stage.
    """


@hookspec
def compute_loss(
    session: Session, run: Run, batch: Batch, output_tensor: torch.Tensor, model_chunk: MegatronModule
) -> Loss | Any:
    """Turn the last pipeline stage's output into the loss of the micro-batch.

    Args:
        batch: what `get_batch` returned for the micro-batch.
        output_tensor: per-token losses ``[b, s]``.

    Returns:
        A `Loss`: the sum over this rank's tokens, the number of tokens, and what is reported. The schedule
        averages as Megatron-LM does: over the tokens of each micro-batch and then over micro-batches, or,
        with ``--calculate-per-token-loss``, over the tokens of the whole step.
    """
