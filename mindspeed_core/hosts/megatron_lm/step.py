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
from mindspeed_core.hosts.megatron_lm.checkpoint import load_for_features
from mindspeed_core.hosts.megatron_lm.flag_ownership import leave_to_features
from mindspeed_core.hosts.megatron_lm.pretrain_call import PretrainCall, arguments_of, intercepts
from mindspeed_core.megatron.loss import loss_of, schedule_loss
from mindspeed_core.megatron.schedule import boundary_options, scheduled
from mindspeed_core.run import Loss, StepResult

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session


class LossNumbers(Mapping[str, float]):
    """Megatron-LM's losses as numbers, read from the device when somebody looks at them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> float:
        return float(self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@intercepts(run=True)
def around_train(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``train``: the loop starts."""
    given, run = arguments_of(original, args, named).arguments, now.run
    run.model, run.optimizer = given["model"], given["optimizer"]
    run.scheduler, run.config = given["opt_param_scheduler"], given["config"]
    leave_to_features(now.session, run)
    load_for_features(now, run)
    now.session.call("start_run", run=now.sync_run())
    return original(*args, **named)


@intercepts(run=True)
def around_train_step(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``train_step``."""
    with now.calling("train_step", lambda: original(*args, **named)) as call:
        result: StepResult = now.session.call("train_step", run=now.sync_run())
    # 0.15 and older do not return the largest attention logit.
    length = 8 if "iteration" in inspect.signature(original).parameters else 7
    values = list(call.result) if call.made else [{}, 0, False, False, 0, None, None, 0][:length]
    losses = result.losses
    if not (isinstance(losses, LossNumbers) and losses.tensors is values[0]):
        values[0] = {name: _on_device(value, now.run) for name, value in losses.items()}
    values[1], values[5], values[6] = int(result.skipped), result.grad_norm, result.num_zeros
    return tuple(values)


def _on_device(value: float, run: Run) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=run.dist.device)


@hookimpl(trylast=True)
def train_step(run: Run) -> StepResult:
    """Do Megatron-LM's step; losses are known on the last pipeline stage."""
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


@intercepts(run=True)
def around_get_schedule(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``get_forward_backward_func``: the schedule, in whose context micro-batches run."""
    run = now.sync_run()
    with now.calling("get_forward_backward", lambda: original(*args, **named)):
        schedule = now.session.call(
            "get_forward_backward", args=now.session.args, config=run.config, pg=run.pg
        )

    @functools.wraps(schedule)
    def run_schedule(*positional: Any, **options: Any) -> Any:
        run = now.sync_run()
        with scheduled(run, training=not options.get("forward_only", False)):
            options |= boundary_options(run, now.session.args, run.config)
            return schedule(*positional, **options)

    run.schedule = run_schedule
    return run_schedule


@hookimpl(trylast=True)
def get_forward_backward() -> Callable[..., Any]:
    """Return megatron-core's schedule for the sizes in use."""
    return pretrain_call.current().pending("get_forward_backward")()


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
        with now.calling("compute_loss", lambda output: loss(output, **named)) as call:
            found: Loss = session.call(
                "compute_loss", run=run, batch=batch, output_tensor=output_tensor, model_chunk=model_chunk
            )
        return schedule_loss(found, averaged=call.made and len(call.result) == 2)

    return output, through_stage


@hookimpl(trylast=True)
def compute_loss(output_tensor: torch.Tensor) -> Loss:
    """Call the script's loss; where it reports no number of tokens, it is a mean and counts as one."""
    return loss_of(pretrain_call.current().pending("compute_loss")(output_tensor))


@intercepts(run=True)
def around_finalize(
    now: PretrainCall,
    original: Callable[..., Any],
    model: Any,
    num_tokens: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool = False,
    **further: Any,
) -> None:
    """Intercept ``finalize_model_grads``."""
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


@hookimpl(trylast=True)
def finalize_gradients(model: list[MegatronModule], num_tokens: torch.Tensor | None) -> Done:
    """Reduce over data, sequence and embedding groups, as megatron-core does."""
    pretrain_call.current().pending("finalize_gradients")(model, num_tokens)
    return DONE
