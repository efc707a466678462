"""Default training step: megatron-core's schedule over micro-batches, and the language-model loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import Batch, Loss, OptimizerStep, StepResult
from mindspeed_megatron.loss import schedule_loss
from mindspeed_megatron.padding import StepLengths, padding_options
from mindspeed_megatron.parameter_gather import start_complete, start_gather
from mindspeed_megatron.schedule import begin_microbatch, boundary_options, scheduled
from mindspeed_megatron.step_tokens import counted_tokens
from mindspeed_megatron.token_losses import check_passed
from mindspeed_megatron.unwrap import unwrap
from mindspeed_train.arguments.run_length import batch_at
from mindspeed_train.fault_tolerance import bad_steps
from mindspeed_train.fault_tolerance.hang_watch import Progress
from mindspeed_train.monitoring.measures import Measures
from mindspeed_train.monitoring.timing import timed, untimed

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


def run_schedule(
    run: Run, iterators: Sequence[Iterator[Any]], num_microbatches: int, *, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """Run the schedule over one batch.

    Returns:
        The reports of its micro-batches, on the last pipeline stage only.
    """
    assert run.schedule is not None
    sizes = run.args.micro_batch_size, run.args.seq_length
    bad_steps.forget_losses(run)
    with (
        scheduled(run, training=not forward_only),
        untimed(run) if forward_only else nullcontext(),
        counted_tokens(
            run,
            run.config,
            list(iterators),
            num_microbatches,
            sizes,
            training=not forward_only,
            read=partial(_batch_of, run),
        ) as data_iterator,
    ):
        reports: list[dict[str, torch.Tensor]] = run.schedule(
            forward_step_func=partial(_forward_for_schedule, run),
            data_iterator=data_iterator,
            model=run.model,
            num_microbatches=num_microbatches,
            seq_length=run.args.seq_length,
            micro_batch_size=run.args.micro_batch_size,
            decoder_seq_length=run.args.seq_length,
            forward_only=forward_only,
            **boundary_options(run, run.args, run.config),
        )
    bad_steps.agree_on_losses(run)
    return reports


def _batch_of(run: Run, item: Any) -> Batch:
    batch: Batch = run.session.call(
        "get_batch",
        run=run,
        data_iterator=iter([item]),
        vp_stage=run.context.vp_stage,
        microbatch=run.context.microbatch,
    )
    return batch


def _forward_for_schedule(
    run: Run, data_iterator: Iterator[Any], model_chunk: MegatronModule, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Callable[..., Any]]:
    begin_microbatch(run, model_chunk)
    run.session.state(Progress).count += 1
    with run.session.state(Measures).forward() if run.context.training else nullcontext():
        result: tuple[torch.Tensor, Callable[..., Any]] = run.session.call(
            "forward_step",
            run=run,
            data_iterator=data_iterator,
            model_chunk=model_chunk,
            return_schedule_plan=return_schedule_plan,
        )
    return result


@hookimpl(trylast=True)
def forward_step(
    session: Session,
    run: Run,
    data_iterator: Iterator[Any],
    model_chunk: MegatronModule,
    return_schedule_plan: bool,
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Fetch the micro-batch and run the chunk on it."""
    vp_stage, microbatch = run.context.vp_stage, run.context.microbatch
    with timed(run, "batch-generator", 2):
        batch = session.call(
            "get_batch", run=run, data_iterator=data_iterator, vp_stage=vp_stage, microbatch=microbatch
        )
    session.state(StepLengths).note(run, batch)
    entry = model_chunk
    options = padding_options(run, batch, model_chunk, planned=return_schedule_plan)
    if batch.packed_seq_params is not None:
        options["packed_seq_params"] = batch.packed_seq_params
    if batch.loss_mask is not None and getattr(run.config, "mtp_num_layers", None):
        options["loss_mask"] = batch.loss_mask
    if return_schedule_plan:
        entry = unwrap(model_chunk).build_schedule_plan
        options["loss_mask"] = batch.loss_mask
    output = entry(batch.tokens, batch.position_ids, batch.attention_mask, labels=batch.labels, **options)
    return output, partial(_loss_for_schedule, run, batch, model_chunk)


def _loss_for_schedule(
    run: Run, batch: Batch, model_chunk: MegatronModule, output_tensor: torch.Tensor
) -> tuple[Any, ...]:
    check_passed(run, at_loss=True)
    loss: Loss = run.session.call(
        "compute_loss", run=run, batch=batch, output_tensor=output_tensor, model_chunk=model_chunk
    )
    return schedule_loss(loss)


@hookimpl(trylast=True)
def compute_loss(run: Run, batch: Batch, output_tensor: torch.Tensor, model_chunk: MegatronModule) -> Loss:
    """Sum the per-token losses ``[b, s]`` over the tokens whose mask is set."""
    assert batch.loss_mask is not None
    mask = batch.loss_mask.reshape(-1).float()
    total = torch.sum(output_tensor.reshape(-1).float() * mask)
    num_tokens = mask.sum()
    bad_steps.check_loss(run, batch, total.detach(), model_chunk)
    return Loss(total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens])})


@hookimpl(trylast=True)
def train_step(session: Session, run: Run) -> StepResult:
    """Zero the gradients, run the schedule, update, advance the learning rate."""
    assert run.optimizer is not None
    assert run.scheduler is not None
    assert run.data is not None
    assert run.data.train is not None
    started = time.perf_counter()
    for chunk in run.model:
        chunk.zero_grad_buffer()
    run.optimizer.zero_grad()
    batch = batch_at(run.args, run.consumed_train_samples)
    iterators = run.data.train
    reports = bad_steps.with_named_gradients(
        run, lambda: run_schedule(run, iterators, batch.microbatches, forward_only=False)
    )
    losses = session.call("reduce_losses", run=run, reports=reports, training=True)
    counts = getattr(losses, "counts", {})
    if bad_steps.verdict(run, losses):
        update = OptimizerStep(successful=False, grad_norm=None, num_zeros=None)
    else:
        with timed(run, "optimizer", 1):
            update = session.call("optimizer_step", run=run)
    if update.successful:
        run.scheduler.step(increment=batch.samples)
    session.platform.synchronize()
    work = session.state(StepLengths).finish(run)
    return StepResult(
        losses=losses,
        skipped=not update.successful,
        grad_norm=update.grad_norm,
        num_zeros=update.num_zeros,
        seconds=time.perf_counter() - started,
        tokens=batch.samples * run.args.seq_length if work is None else work.tokens,
        counts=counts,
    )


def configure_for_training(run: Run) -> None:
    """Give megatron-core's configuration the callables its schedules use."""
    args, config, model = run.args, run.config, run.model
    assert run.optimizer is not None
    config.grad_scale_func = run.optimizer.scale_loss
    single = len(model) == 1
    if args.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync[0] if single else no_sync
        if args.align_grad_reduce:
            starts = [chunk.start_grad_sync for chunk in model]
            config.grad_sync_func = starts[0] if single else starts
    if args.overlap_param_gather and args.align_param_gather and not single:
        config.param_sync_func = [partial(start_gather, chunk) for chunk in model]

    def finalize(
        chunks: list[MegatronModule],
        num_tokens: torch.Tensor | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
    ) -> None:
        if args.bad_step_action == "stop":
            # megatron-core looks at gradients when it reduces them and stops the rank that has a bad one.
            bad_steps.agree_on_losses(run)
        run.session.call(
            "finalize_gradients",
            run=run,
            model=chunks,
            num_tokens=num_tokens,
            pg=pg_collection,
            force_all_reduce=force_all_reduce,
        )

    config.finalize_model_grads_func = finalize
    bad_steps.let_gradients_wait(run)
    start_complete(model)
