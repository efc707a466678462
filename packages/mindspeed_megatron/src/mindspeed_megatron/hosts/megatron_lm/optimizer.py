"""The optimizer, its schedule and its step: interceptions and defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import OptimizerStep
from mindspeed_megatron import optimizer_state
from mindspeed_megatron.brought_choices import bringing, check_optimizer, check_schedule, stands_in
from mindspeed_megatron.hosts.megatron_lm import NAME, pretrain_call
from mindspeed_megatron.hosts.megatron_lm.model import begin_run
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, intercepts


@intercepts()
def around_optimizer_config(now: PretrainCall, original: Callable[..., Any], args: Any) -> Any:
    """Intercept ``get_megatron_optimizer_config``: the configuration beside overrides of parameters."""
    now.optimizer_configured = True
    with now.calling("build_optimizer_config", lambda: original(args)) as call:
        config = now.session.call("build_optimizer_config", args=now.session.args)
    overrides = call.result[1] if call.made else original(args)[1]
    return config, overrides


@hookimpl(trylast=True)
def build_optimizer_config() -> OptimizerConfig:
    """Return what Megatron-LM fills in from its arguments."""
    return pretrain_call.current().pending("build_optimizer_config")()[0]


@intercepts()
def around_get_optimizer(
    now: PretrainCall, original: Callable[..., Any], config: Any, model_chunks: Any, *rest: Any, **named: Any
) -> Any:
    """Intercept ``get_megatron_optimizer`` and its sibling for muon."""
    if now.call("build_optimizer") is not None:
        return original(config, model_chunks, *rest, **named)
    session = now.session
    if not now.has_run:
        begin_run(now, model_chunks)
    if now.wants("build_optimizer_config") and not now.optimizer_configured:
        # Megatron-LM 0.15 and older fill the configuration in the function that calls this one.
        filled = config
        with now.calling("build_optimizer_config", lambda: (filled, None)):
            config = session.call("build_optimizer_config", args=session.args)
    with now.calling("build_optimizer", lambda chosen, chunks: original(chosen, chunks, *rest, **named)):
        optimizer = session.call(
            "build_optimizer", args=session.args, optimizer_config=config, model=model_chunks, pg=now.run.pg
        )
    check_optimizer(session, optimizer)
    if now.run.optimizer is None:
        now.run.optimizer = optimizer
    _save_exactly(now, optimizer)
    if now.wants("optimizer_step"):
        _step_through_stage(now, optimizer)
    return optimizer


@hookimpl(trylast=True)
def build_optimizer(optimizer_config: OptimizerConfig, model: list[Any]) -> MegatronOptimizer:
    """Build megatron-core's optimizer, as Megatron-LM asks for it."""
    now = pretrain_call.current()
    optimizer: MegatronOptimizer = now.pending("build_optimizer")(optimizer_config, model)
    if bringing(now.session, "--optimizer"):
        stands_in(now.session, optimizer)
    return optimizer


def _step_through_stage(now: PretrainCall, optimizer: Any) -> None:
    session, step = now.session, optimizer.step

    def through_stage(*args: Any, **named: Any) -> Any:
        with now.calling("optimizer_step", lambda: step(*args, **named)):
            update: OptimizerStep = session.call("optimizer_step", run=now.sync_run())
        return update.successful, update.grad_norm, update.num_zeros

    session.instances.set(NAME, optimizer, "step", through_stage)


@hookimpl(trylast=True)
def optimizer_step() -> OptimizerStep:
    """Do the optimizer's own step; Megatron-LM agrees with other ranks about the outcome afterwards."""
    successful, grad_norm, num_zeros = pretrain_call.current().pending("optimizer_step")()
    return OptimizerStep(successful, grad_norm, num_zeros)


class _Original:
    """The methods of an optimizer's class, without our changes of the instance."""

    def __init__(self, optimizer: Any) -> None:
        kind = type(optimizer)
        self.chained_optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self.sharded_state_dict = kind.sharded_state_dict.__get__(optimizer)
        self.load_state_dict = kind.load_state_dict.__get__(optimizer)


def _save_exactly(now: PretrainCall, optimizer: Any) -> None:
    """Let a checkpoint hold the optimizer's state exactly, as megatron-core alone does not."""
    original: Any = _Original(optimizer)
    if not optimizer_state.needs_care(original):
        return
    parameters = inspect.signature(original.sharded_state_dict).parameters

    def sharded_state_dict(model_state: Any, *args: Any, **named: Any) -> Any:
        given = dict(zip(list(parameters)[1:], args)) | named
        loading = bool(given.get("is_loading", False))
        try:
            return optimizer_state.sharded_state(
                original, model_state, given.get("metadata") or {}, is_loading=loading
            )
        finally:
            if not loading:
                optimizer_state.forget_overrides(original)

    def load_state_dict(state: Any) -> None:
        optimizer_state.load_state(original, state)

    instances = now.session.instances
    instances.set(NAME, optimizer, "sharded_state_dict", sharded_state_dict)
    instances.set(NAME, optimizer, "load_state_dict", load_state_dict)


@intercepts(run=True)
def around_get_scheduler(now: PretrainCall, original: Callable[..., Any], optimizer: Any) -> Any:
    """Intercept ``get_optimizer_param_scheduler``."""
    with now.calling("build_scheduler", original):
        scheduler = now.session.call("build_scheduler", args=now.session.args, optimizer=optimizer)
    check_schedule(now.session, scheduler)
    now.run.scheduler = scheduler
    return scheduler


@hookimpl(trylast=True)
def build_scheduler(optimizer: MegatronOptimizer) -> Any:
    """Build Megatron-LM's schedule of the learning rate, counted in samples."""
    return pretrain_call.current().pending("build_scheduler")(optimizer)
