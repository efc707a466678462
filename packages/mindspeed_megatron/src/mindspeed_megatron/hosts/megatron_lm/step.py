"""The first step, the step, the schedule and the loss: interceptions and defaults."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.module import MegatronModule

from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_core.run import Batch, Loss, StepResult
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_megatron.chunk_places import loss_rank
from mindspeed_megatron.hosts.megatron_lm import NAME, pretrain_call
from mindspeed_megatron.hosts.megatron_lm.checkpoint import load_for_features
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, arguments_of, intercepts
from mindspeed_megatron.hosts.megatron_lm.told_models import tell_model
from mindspeed_megatron.loss import is_mean, loss_of, on_every_stage, schedule_loss
from mindspeed_megatron.loss_reduction import with_same_names
from mindspeed_megatron.losses import Losses
from mindspeed_megatron.schedule import begin_microbatch, boundary_options, scheduled
from mindspeed_megatron.step_tokens import counted_tokens
from mindspeed_megatron.token_losses import check_passed

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


_OF_THE_STAGE = "_mindspeed_stage"


class LossNumbers(Losses):
    """Megatron-LM's losses as numbers, read from the device when somebody looks at them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(lambda: {name: float(value) for name, value in tensors.items()})
        self.tensors = tensors


def _begin(now: PretrainCall) -> None:
    """Load for features where no flag names a checkpoint, and call ``start_run``, before the first step."""
    # A feature may set the generator of dropout in the stage.
    now.generator.put_back()
    if now.began:
        return
    now.began = True
    load_for_features(now, now.run)
    if now.wants("start_run"):
        now.session.call("start_run", run=now.sync_run())


@intercepts(run=True)
def around_train_step(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``train_step``."""
    given, run = arguments_of(original, args, named).arguments, now.run
    run.model, run.optimizer = given["model"], given["optimizer"]
    run.scheduler, run.config = given["opt_param_scheduler"], given["config"]
    _begin(now)
    with now.calling("train_step", lambda: original(*args, **named)) as call:
        result: StepResult = now.session.call("train_step", run=now.sync_run())
    # 0.15 and older do not return the largest attention logit.
    length = 8 if "iteration" in inspect.signature(original).parameters else 7
    values = list(call.result) if call.made else [{}, 0, False, False, 0, None, None, 0][:length]
    losses = result.losses
    if isinstance(losses, LossNumbers):
        values[0] = losses.tensors
    elif values[0] or not call.made:
        # Pipeline stages without loss log none.
        values[0] = {name: _on_device(value, now.run) for name, value in losses.items()}
    values[1], values[5], values[6] = int(result.skipped), result.grad_norm, result.num_zeros
    return tuple(values)


def _on_device(value: float, run: Run) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=run.dist.device)


@hookimpl(trylast=True)
def train_step(run: Run) -> StepResult:
    """Do Megatron-LM's step; its losses are known on the last pipeline stage."""
    started = time.perf_counter()
    now = pretrain_call.current()
    values = now.pending("train_step")()
    losses: Mapping[str, float] = LossNumbers(values[0])
    if now.wants("reduce_losses"):
        with now.calling("reduce_losses", lambda: values[0]):
            losses = now.session.call("reduce_losses", run=run, reports=now.reports, training=True)
    return StepResult(
        losses=losses,
        skipped=bool(values[1]),
        grad_norm=values[5],
        num_zeros=values[6],
        seconds=time.perf_counter() - started,
        tokens=run.args.global_batch_size * run.args.seq_length,
        counts=getattr(losses, "counts", {}),
    )


@hookimpl(trylast=True)
def reduce_losses(run: Run) -> Losses:
    """Return what Megatron-LM reduced, on every pipeline stage; over how many tokens it does not say."""
    losses = LossNumbers(pretrain_call.current().pending("reduce_losses")())
    if run.pg.pp.size() == 1:
        return losses
    everywhere = on_every_stage(dict(losses), run.pg.pp)
    return Losses(lambda: everywhere)


@intercepts(run=True)
def around_get_schedule(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``get_forward_backward_func``: the schedule, in whose context micro-batches run."""
    run = now.sync_run()
    with now.calling("get_forward_backward", lambda: original(*args, **named)):
        schedule = now.session.call(
            "get_forward_backward", args=now.session.args, config=run.config, pg=run.pg, run=run
        )

    @functools.wraps(schedule)
    def run_schedule(*positional: Any, **options: Any) -> Any:
        run = now.sync_run()
        training = not options.get("forward_only", False)
        if training:
            _begin(now)
        # Megatron-LM calls it by keyword.
        number, iterator = options.get("num_microbatches", 1), options.get("data_iterator")
        sizes = options.get("micro_batch_size", 1), options.get("seq_length", 1)
        with (
            scheduled(run, training=training),
            counted_tokens(
                run, run.config, iterator, number, sizes, training=training and not positional
            ) as iterator,
        ):
            options |= boundary_options(run, now.session.args, run.config)
            options |= {"data_iterator": iterator} if "data_iterator" in options else {}
            reports = schedule(*positional, **options)
        if now.wants("place_chunks"):
            reports = _where_the_script_looks(run, reports)
        if now.wants("reduce_losses"):
            now.reports = reports
        if now.wants("compute_loss") and not options.get("collect_non_loss_data", False):
            # Megatron-LM reduces name by name, those of the first micro-batch.
            reports = with_same_names(run, reports, training=training)
        return reports

    run.schedule = run_schedule
    return run_schedule


def _where_the_script_looks(run: Run, reports: list[Any]) -> list[Any]:
    """Bring what micro-batches reported to the last pipeline rank, where Megatron-LM looks for it.

    Collective over pipeline ranks, but only where a feature places the loss elsewhere.
    """
    size = run.pg.pp.size()
    owner = loss_rank(run.session, run.session.args, size)
    if owner == size - 1:
        return reports
    told = [
        {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in report.items()}
        for report in (reports if run.pg.pp.rank() == owner else [])
    ]
    found = all_gather_values(told, run.pg.pp)[owner]
    if run.pg.pp.rank() != size - 1:
        return []
    device = run.dist.device
    return [
        {
            name: value.to(device) if isinstance(value, torch.Tensor) else value
            for name, value in report.items()
        }
        for report in found
    ]


@hookimpl(trylast=True)
def get_forward_backward() -> Callable[..., Any]:
    """Return megatron-core's schedule for the sizes in use."""
    return pretrain_call.current().pending("get_forward_backward")()


def forward(
    now: PretrainCall,
    original: Callable[..., Any],
    data_iterator: Iterator[Any],
    model_chunk: MegatronModule,
    rest: tuple[Any, ...],
    named: dict[str, Any],
) -> Any:
    """Run the script's forward step through its stage; the schedule calls it for each micro-batch."""
    run = now.sync_run()
    if now.wants("finalize_gradients"):
        _finalize_through_stage(now, run.config)
    stages = ("forward_step", "compute_token_losses", "compute_loss", "get_batch")
    if not now.wants(*stages) and not now.tells_padding:
        return original(data_iterator, model_chunk, *rest, **named)
    begin_microbatch(run, model_chunk)
    now.batch, now.described_by_script = Batch(), None
    if now.tells_padding or now.describes_beside:
        tell_model(now, model_chunk)
    with now.calling("forward_step", lambda iterator, chunk: original(iterator, chunk, *rest, **named)):
        return now.session.call(
            "forward_step",
            run=run,
            data_iterator=data_iterator,
            model_chunk=model_chunk,
            return_schedule_plan=bool(named.get("return_schedule_plan", False)),
        )


@hookimpl(trylast=True)
def forward_step(
    session: Session, run: Run, data_iterator: Iterator[Any], model_chunk: MegatronModule
) -> tuple[Any, Callable[..., Any]]:
    """Call the script's forward step; its loss function becomes a stage."""
    now = pretrain_call.current()
    output, loss = now.pending("forward_step")(data_iterator, model_chunk)
    if not now.wants("compute_loss"):
        return output, loss
    batch = now.batch

    @functools.wraps(loss)
    def through_stage(output_tensor: torch.Tensor, **named: Any) -> Any:
        if named.get("non_loss_data"):
            return loss(output_tensor, **named)
        check_passed(run, at_loss=True)
        with now.calling("compute_loss", lambda output: loss_of(loss(output, **named))) as call:
            found: Loss = session.call(
                "compute_loss", run=run, batch=batch, output_tensor=output_tensor, model_chunk=model_chunk
            )
        return schedule_loss(found, averaged=is_mean(found, call.result))

    return output, through_stage


@hookimpl(trylast=True)
def compute_loss(output_tensor: torch.Tensor) -> Loss:
    """Call the script's loss; where it reports no number of tokens, it is a mean and counts as one."""
    found: Loss = pretrain_call.current().pending("compute_loss")(output_tensor)
    return found


def _finalize_through_stage(now: PretrainCall, config: Any) -> None:
    """Put the stage where the loop has put its function and the schedule looks for it."""
    original = config.finalize_model_grads_func
    if original is None or hasattr(original, _OF_THE_STAGE):
        return

    def through_stage(
        model: Any,
        num_tokens: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
        **further: Any,
    ) -> None:
        named = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce} | further
        # megatron-core 0.15 takes neither.
        named = {name: value for name, value in named.items() if value not in (None, False)}
        with now.calling("finalize_gradients", lambda chunks, tokens: original(chunks, tokens, **named)):
            now.session.call(
                "finalize_gradients",
                run=now.sync_run(),
                model=model,
                num_tokens=num_tokens,
                pg=pg_collection,
                force_all_reduce=force_all_reduce,
            )

    setattr(through_stage, _OF_THE_STAGE, True)
    now.session.instances.set(NAME, config, "finalize_model_grads_func", through_stage)


@hookimpl(trylast=True)
def finalize_gradients(model: list[MegatronModule], num_tokens: torch.Tensor | None) -> Done:
    """Reduce over data, sequence and embedding groups, as megatron-core does."""
    pretrain_call.current().pending("finalize_gradients")(model, num_tokens)
    return DONE
