"""Stages of one training step: the schedule, and the forward pass and loss of each micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

__all__ = [
    "compute_loss",
    "compute_token_losses",
    "forward_step",
    "get_forward_backward",
    "reduce_losses",
    "train_step",
]


@hookspec(added={"run": "1.2"})
def get_forward_backward(
    session: Session, args: Namespace, config: TransformerConfig, pg: ProcessGroupCollection, run: Run
) -> Callable[..., Any] | Any:
    """Return the pipeline schedule: a callable with megatron-core's forward-backward signature.

    Slot ``pipeline-schedule``. Called once or several times in a run (Megatron-LM's scripts ask before every
    step), so what a schedule keeps belongs into ``session.state``. Evaluation uses the same schedule with
    ``forward_only``.

    A schedule that runs the micro-batches of a chunk in another order than from 0 on, or one of them twice,
    announces each forward pass with ``mindspeed_megatron.schedule.announced``; without that the passes
    of each chunk are counted. Whoever fills the slot decides which numbers of micro-batches and which tensors
    between stages it can do: hosts refuse none.
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


@hookspec(since="1.1")
def compute_token_losses(
    session: Session,
    run: Run,
    logits: torch.Tensor,
    labels: torch.Tensor,
    model_chunk: MegatronModule,
    head: int,
) -> torch.Tensor | Any:
    """Turn logits into per-token losses, inside the model that holds the output layer.

    Slot ``lm-loss``. The default is the model's own ``compute_language_model_loss``: cross entropy over the
    whole vocabulary, plain or fused. Called in training and evaluation, by a forward pass and by a schedule
    plan, once per micro-batch, and once more for each prediction of a further token (``--mtp-num-layers``).
    What a wrapper adds to the result is trained like the loss of the token; what is to be reported under a
    name of its own goes through ``Loss.plus`` in `compute_loss`, which follows on the same rank.

    Args:
        logits: ``[s, b, v / tp]``, this rank's part of the vocabulary, its padding included; ``s`` is the
            whole sequence under sequence parallelism, the rank's part under context parallelism. In the
            dtype of the output layer, and unchanged after the ``yield``.
        labels: ``[b, s]`` int64; those of the further token for its prediction.
        model_chunk: the language model itself, without wrappers. The ranks of ``run.pg.tp`` hold the whole
            vocabulary together.
        head: 0, or which prediction of a further token this is, from 1 on. Those come before 0 within a
            micro-batch, and what they make reaches no other stage.

    Returns:
        Losses ``[b, s]``, masked tokens included.
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
        with ``--calculate-per-token-loss``, over the tokens of the whole step. A wrapper adds to it with
        ``loss.plus(name, sum, tokens, weight=...)``, which is right for every host and layout.
    """


@hookspec(since="1.1")
def reduce_losses(
    session: Session, run: Run, reports: Sequence[Mapping[str, torch.Tensor]], training: bool
) -> Mapping[str, float] | Any:
    """Reduce the losses that micro-batches reported to those of the step. Called on every rank.

    The default sums over micro-batches and data-parallel ranks in one collective for all names, hands the
    result to every pipeline stage, and leaves the numbers on the device: a `Losses` that is read when
    somebody looks at one, usually where the step is logged. Names may differ between micro-batches and
    ranks. In training, one that comes up after the first step is reported from the following step on. What
    layers add to the gradient by themselves (balance of experts, predictions of further tokens) joins them
    in `mindspeed-train`, in one collective for all such losses; who replaces the stage reduces it too, with
    ``mindspeed_megatron.layer_losses``.

    A feature that adds a name returns ``losses | {"name": value}``. One that reads a number waits for the
    device, in every step.

    Args:
        reports: one dictionary per micro-batch of this rank, name to ``[sum, count]``; empty on pipeline
            stages without loss.
        training: False for the reports of an evaluation.

    Returns:
        The mean losses by name, the same on every rank.
    """
