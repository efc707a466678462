"""Stages that build the optimizer and its schedule, and apply it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed_core.hooks.marker import Done, hookspec

if TYPE_CHECKING:
    from argparse import Namespace

    import torch
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.run import OptimizerStep, Run
    from mindspeed_core.session import Session

__all__ = [
    "build_optimizer",
    "build_optimizer_config",
    "build_scheduler",
    "finalize_gradients",
    "optimizer_step",
]


@hookspec
def build_optimizer_config(session: Session, args: Namespace) -> OptimizerConfig | Any:
    """Build megatron-core's optimizer configuration; a feature may return a subclass instance.

    For a value of ``--optimizer`` that a feature brings, it is of megatron-core's general class.
    """


@hookspec
def build_optimizer(
    session: Session,
    args: Namespace,
    optimizer_config: OptimizerConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> MegatronOptimizer | Any:
    """Build the optimizer over the wrapped chunks.

    A feature with another inner optimizer wraps the stage and calls `mindspeed_core.put_inside`, or returns
    another ``MegatronOptimizer``. A value of ``--optimizer`` that a feature brings is built as Adam, which
    the feature must replace.
    """


@hookspec
def build_scheduler(
    session: Session, args: Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler | Any:
    """Build the learning-rate and weight-decay schedule; steps are counted in samples.

    A value of ``--lr-decay-style`` that a feature brings is built as a constant rate, which the feature must
    change: it wraps the stage and calls `mindspeed_core.follow_schedule`.
    """


@hookspec
def finalize_gradients(
    session: Session,
    run: Run,
    model: list[MegatronModule],
    num_tokens: torch.Tensor | None,
    pg: ProcessGroupCollection | None,
    force_all_reduce: bool,
) -> Done | Any:
    """Finish the gradients of a step: reductions over data, sequence and embedding groups, token scaling.

    Called by the pipeline schedule after its last backward. A wrapper may finish delayed gradients before, or
    reduce over further groups after its ``yield``.

    Args:
        num_tokens: tokens of the step with ``--calculate-per-token-loss``, otherwise None.
        force_all_reduce: all-reduce instead of reduce-scatter, also with a distributed optimizer.
    """


@hookspec
def optimizer_step(session: Session, run: Run) -> OptimizerStep | Any:
    """Clip the gradients and update the parameters once.

    A wrapper may move parameters or optimizer shards between ranks after the update. Before its ``yield`` the
    gradients are finished and the parameters are those of the step; a wrapper that reads parameters after it
    calls ``run.complete_parameters()`` first, since ``--overlap-param-gather`` has not gathered them yet.
    `mindspeed_megatron.gradient_norm.gradient_norm` gives the norm of all gradients before the update.
    """
