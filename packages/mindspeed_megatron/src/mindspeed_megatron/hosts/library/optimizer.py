"""Default optimizer and update of a library session: the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_core.run import OptimizerStep
from mindspeed_megatron import gradients
from mindspeed_megatron.brought_choices import STAND_INS, bringing, stands_in

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_megatron.hosts.library.session import LibrarySession


@hookimpl(trylast=True)
def build_optimizer_config(session: LibrarySession) -> OptimizerConfig:
    """Return the caller's options; Adam stands in for an optimizer that a feature brings."""
    options: Any = session.given("build_optimizer_config")
    if bringing(session, "--optimizer"):
        options.optimizer = STAND_INS["--optimizer"][1]
    return options


@hookimpl(trylast=True)
def build_optimizer(session: LibrarySession) -> MegatronOptimizer:
    """Return the caller's optimizer."""
    optimizer: MegatronOptimizer = session.given("build_optimizer")
    if bringing(session, "--optimizer"):
        stands_in(session, optimizer)
    return optimizer


@hookimpl(trylast=True)
def build_scheduler(session: LibrarySession) -> OptimizerParamScheduler:
    """Return the caller's schedule."""
    return session.given("build_scheduler")


@hookimpl(trylast=True)
def finalize_gradients(
    session: LibrarySession,
    model: list[MegatronModule],
    num_tokens: torch.Tensor | None,
    pg: ProcessGroupCollection | None,
    force_all_reduce: bool,
) -> Done:
    """Call the caller's function; without one reduce as megatron-core does."""
    function = session.given("finalize_gradients")
    if function is None:
        return gradients.finalize_gradients(
            model=model, num_tokens=num_tokens, pg=pg, force_all_reduce=force_all_reduce
        )
    function(model, num_tokens)
    return DONE


@hookimpl(trylast=True)
def optimizer_step(session: LibrarySession) -> OptimizerStep:
    """Do the caller's update."""
    return session.given("optimizer_step")()
