"""The loop's start, the step, the schedule and the loss: interceptions and defaults."""

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
from mindspeed_core.hosts.megatron_lm import pretrain_call
from mindspeed_core.hosts.megatron_lm.flag_ownership import leave_to_features
from mindspeed_core.hosts.standalone.model.build import unwrap
from mindspeed_core.run import Batch, Loss, StepResult

if TYPE_CHECKING:
    from mindspeed_core.hosts.megatron_lm.pretrain_call import Running
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


class LossNumbers(Mapping[str, float]):
    """Megatron-LM's losses as numbers, read from the device when somebody looks at them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Keep the tensors."""
        self.tensors = tensors

    def __getitem__(self, name: str) -> float:
        """One loss."""
        return float(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        """Names."""
        return iter(self.tensors)

    def __len__(self) -> int:
        """How many."""
        return len(self.tensors)


def around_train(original: Callable[..., Any]) -> Callable[..., Any]:
    """``train``: the loop starts."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*args: Any, **named: Any) -> Any:
        now = pretrain_call.find()
        if now is None or now.session is None or now.run is None:
            return original(*args, **named)
        given = signature.bind(*args, **named).arguments
        run = now.run
        run.model, run.optimizer = given["model"], given["optimizer"]
        run.scheduler, run.config = given["opt_param_scheduler"], given["config"]
        leave_to_features(now.session, run)
        now.session.call("start_run", run=now.present())
        return original(*args, **named)

    return train


@hookimpl(trylast=True)
def start_run() -> Done:
    """Nothing to prepare."""
    return DONE


def around_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """``train_step``."""
    # 0.15 and older do not return the largest attention logit.
    length = 8 if "iteration" in inspect.signature(original).parameters else 7

    @functools.wraps(original)
    def train_step(*args: Any, **named: Any) -> Any:
        now = pretrain_call.find()
        if now is None or now.session is None or now.run is None:
            return original(*args, **named)
        with now.calling("train_step", lambda: original(*args, **named)) as call:
            result: StepResult = now.session.call("train_step", run=now.present())
        values = list(call.result) if call.made else [{}, 0, False, False, 0, None, None, 0][:length]
        losses = result.losses
        if not (isinstance(losses, LossNumbers) and losses.tensors is values[0]):
            values[0] = {name: _on_device(value, now.run) for name, value in losses.items()}
        values[1], values[5], values[6] = int(result.skipped), result.grad_norm, result.num_zeros
        return tuple(values)

    return train_step


def _on_device(value: float, run: Run) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=run.dist.device)


@hookimpl(trylast=True)
def train_step(run: Run) -> StepResult:
    """Megatron-LM's step; losses are known on the last pipeline stage."""
    started = time.perf_counter()
    values = pretrain_call.current().pending("train_step")()
    return StepResult(
        losses=LossNumbers(values[0]),
        skipped=bool(values[1]),
        grad_norm=values[5],
        num_zeros=values[6],
        seconds=time.perf_counter() - started,
        tokens=run.args.global_batch_size * run.args.seq_length,
    )


def around_get_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """``get_forward_backward_func``: the schedule, which counts micro-batches as it goes."""

    @functools.wraps(original)
    def get_schedule(*args: Any, **named: Any) -> Any:
        now = pretrain_call.find()
        if now is None or now.session is None or now.run is None:
            return original(*args, **named)
        run = now.present()
        with now.calling("get_forward_backward", lambda: original(*args, **named)):
            schedule = now.session.call(
                "get_forward_backward", args=now.session.args, config=run.config, pg=run.pg
            )
        run.schedule = _counting(now, schedule)
        return run.schedule

    return get_schedule


@hookimpl(trylast=True)
def get_forward_backward() -> Callable[..., Any]:
    """megatron-core's schedule for the sizes in use."""
    schedule: Callable[..., Any] = pretrain_call.current().pending("get_forward_backward")()
    return schedule


def _counting(now: Running, schedule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(schedule)
    def counted(*args: Any, **named: Any) -> Any:
        run = now.present()
        context = run.context
        now.microbatches = {}
        context.training = not named.get("forward_only", False)
        named |= _boundary(now, run)
        try:
            return schedule(*args, **named)
        finally:
            context.microbatch, context.vp_stage, context.training = -1, None, True

    return counted


def _boundary(now: Running, run: Run) -> dict[str, Any]:
    """What the schedule is told of tensors between stages: nothing, unless a feature changes them."""
    if not now.wants("boundary_schema") or run.pg.pp.size() == 1:
        return {}
    session = now.opened()
    if run.boundary is None:
        run.boundary = session.call("boundary_schema", args=session.args, config=run.config)
    shapes = [spec.shape for spec in run.boundary.tensors]
    return {"adjust_tensor_shapes_fn": lambda receive, send: (list(shapes), list(shapes))}


def enter_microbatch(now: Running, model: Any) -> None:
    """Count a micro-batch of a chunk."""
    run = now.present()
    vp_stage = getattr(unwrap(model), "vp_stage", None)
    run.context.microbatch = now.microbatches.get(vp_stage, 0)
    run.context.vp_stage = vp_stage
    now.microbatches[vp_stage] = run.context.microbatch + 1
    now.batch = Batch()


@hookimpl(trylast=True)
def forward_step(
    session: Session, run: Run, data_iterator: Iterator[Any], model_chunk: MegatronModule
) -> tuple[Any, Callable[..., Any]]:
    """The script's forward step; its loss function becomes a stage."""
    now = pretrain_call.current()
    output, loss = now.pending("forward_step")(data_iterator, model_chunk)
    if not now.wants("compute_loss"):
        return output, loss
    batch = now.batch

    @functools.wraps(loss)
    def through_stage(output_tensor: torch.Tensor, **named: Any) -> Any:
        if named.get("non_loss_data"):
            return loss(output_tensor, **named)
        with now.calling("compute_loss", lambda output: loss(output, **named)) as call:
            found: Loss = session.call(
                "compute_loss", run=run, batch=batch, output_tensor=output_tensor, model_chunk=model_chunk
            )
        # The schedule divides the loss in place, so what is reported must not share its memory.
        report = {name: value.detach().to(torch.float32, copy=True) for name, value in found.report.items()}
        if call.made and len(call.result) == 2:
            return found.total, report
        return found.total, found.num_tokens.to(torch.int), report

    return output, through_stage


@hookimpl(trylast=True)
def compute_loss(output_tensor: torch.Tensor) -> Loss:
    """The script's loss; where it reports no number of tokens, it is a mean and counts as one."""
    values = pretrain_call.current().pending("compute_loss")(output_tensor)
    if len(values) == 3:
        return Loss(*values)
    total, report = values
    return Loss(total, torch.ones((), dtype=torch.int, device=total.device), report, averaged=True)


def around_finalize(original: Callable[..., Any]) -> Callable[..., Any]:
    """``finalize_model_grads``."""

    @functools.wraps(original)
    def finalize(
        model: Any,
        num_tokens: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
        **further: Any,
    ) -> None:
        now = pretrain_call.find()
        named = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce} | further
        # megatron-core 0.15 takes neither.
        named = {name: value for name, value in named.items() if value not in (None, False)}
        if now is None or now.session is None or now.run is None:
            original(model, num_tokens, **named)
            return
        with now.calling("finalize_gradients", lambda chunks, tokens: original(chunks, tokens, **named)):
            now.session.call(
                "finalize_gradients",
                run=now.present(),
                model=model,
                num_tokens=num_tokens,
                pg=pg_collection,
                force_all_reduce=force_all_reduce,
            )

    return finalize


@hookimpl(trylast=True)
def finalize_gradients(model: list[MegatronModule], num_tokens: torch.Tensor | None) -> Done:
    """megatron-core's reductions over data, sequence and embedding groups."""
    pretrain_call.current().pending("finalize_gradients")(model, num_tokens)
    return DONE
