"""Logging, validation and stopping: interceptions and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import StepResult
from mindspeed_core.runtime.metrics import report_lines
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_megatron.hosts.megatron_lm import pretrain_call
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, arguments_of, intercepts
from mindspeed_megatron.hosts.megatron_lm.step import LossNumbers
from mindspeed_megatron.loss import on_every_stage

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_ADVANCED = "advanced iterations"
"""Under which Megatron-LM counts the steps since its last line."""
_OWN = frozenset({"step", "loss", "learning_rate", "grad_norm", "skipped", "num_zeros"})
_TEST, _VALID = "test", "valid"


@intercepts(run=True)
def around_training_log(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``training_log``: numbers of features join those that are averaged, printed and written."""
    bound = arguments_of(original, args, named)
    given = bound.arguments
    if given["iteration"] % now.run.args.log_interval == 0:
        given["loss_dict"] = {**given["loss_dict"], **_numbers_of_features(now, given)}
    return original(*bound.args, **bound.kwargs)


def _numbers_of_features(now: PretrainCall, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    run = now.sync_run()
    run.iteration = given["iteration"]
    result = StepResult(
        losses=on_every_stage(dict(LossNumbers(given["loss_dict"])), run.pg.pp),
        skipped=bool(given["skipped_iter"]),
        grad_norm=given["grad_norm"],
        num_zeros=given["num_zeros_in_grad"],
        tokens=run.args.global_batch_size * run.args.seq_length,
    )
    with now.calling("log_step", lambda: {"learning_rate": given["learning_rate"]}):
        numbers = now.session.call("log_step", run=run, result=result)
    for line in report_lines(numbers) if run.dist.rank == 0 else ():
        emit(f"mindspeed: {line}")
    own = _OWN | set(result.losses)
    # Megatron-LM prints the mean over the steps since its last line.
    steps = given["total_loss_dict"].get(_ADVANCED, 0) + (0 if result.skipped else 1)
    return {
        name: torch.tensor(float(value) * steps, dtype=torch.float32, device=run.dist.device)
        for name, value in numbers.items()
        if name not in own and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


@hookimpl(trylast=True)
def log_step(run: Run, result: StepResult) -> dict[str, Any]:
    """Join Megatron-LM's numbers and what features recorded."""
    numbers: dict[str, Any] = {
        "step": run.iteration,
        "loss": result.losses.get("lm loss"),
        "grad_norm": result.grad_norm,
        "skipped": result.skipped,
        **pretrain_call.current().pending("log_step")(),
        **{name: value for name, value in result.losses.items() if name != "lm loss"},
    }
    # Another rank may have recorded what this one has not.
    if run.metrics.names() or run.dist.world_size > 1:
        numbers.update(run.metrics.reduce())
        run.metrics.clear()
    return numbers


@intercepts(run=True)
def around_evaluate(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``evaluate``, called once per set of a split."""
    iterator = arguments_of(original, args, named).arguments["data_iterator"]
    tested = any(iterator is known for known in now.test_iterators if known is not None)
    now.run.complete_parameters()
    with now.calling("evaluate", lambda: original(*args, **named)) as call:
        losses = now.session.call("evaluate", run=now.sync_run(), split=_TEST if tested else _VALID)
    values = call.result if call.made else ({}, None, False)
    if values[2]:
        return values
    device = now.run.dist.device
    return {name: torch.tensor(value, device=device) for name, value in losses.items()}, *values[1:]


@hookimpl(trylast=True)
def evaluate() -> dict[str, float]:
    """Return Megatron-LM's mean losses; none where its time was up."""
    losses = pretrain_call.current().pending("evaluate")()[0]
    return dict(LossNumbers(losses or {}))


@intercepts(run=True)
def around_decide_exit(now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Intercept ``checkpoint_and_decide_exit``."""
    with now.calling("should_stop", lambda: original(*args, **named)) as call:
        reason = now.session.call("should_stop", run=now.sync_run())
    if reason and not call.result:
        _save_before_stopping(arguments_of(original, args, named).arguments, reason, now.run)
    return bool(reason)


def _save_before_stopping(given: dict[str, Any], reason: str, run: Run) -> None:
    from megatron.training import training

    if run.dist.rank == 0:
        emit(f"mindspeed: stopping: {reason}")
    args, iteration = run.args, given["iteration"]
    just_saved = args.save_interval and iteration % args.save_interval == 0
    if args.save and not just_saved:
        training.save_checkpoint_and_time(**given)


@hookimpl(trylast=True)
def should_stop() -> str:
    """Stop for Megatron-LM's own reasons: signal, time, interval."""
    return "Megatron-LM's own reason" if pretrain_call.current().pending("should_stop")() else ""
