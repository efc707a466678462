"""Default optimizer, learning-rate schedule and update."""

from __future__ import annotations

import copy
from argparse import Namespace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as mcore_optimizer
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import OptimizerStep
from mindspeed_megatron.brought_choices import STAND_INS, bringing, stands_in, unknown
from mindspeed_megatron.config_values import config_values
from mindspeed_train.arguments.configuration_errors import refused_configuration

if TYPE_CHECKING:
    from mindspeed_core.run import Run
    from mindspeed_core.session import Session

# megatron-core 0.16 splits the class by optimizer; 0.15 has one.
_CONFIGS = {"adam": "AdamOptimizerConfig", "sgd": "SGDOptimizerConfig"}


@hookimpl(trylast=True)
def build_optimizer_config(session: Session, args: Namespace) -> OptimizerConfig:
    """Fill the configuration class that the installed megatron-core has for the chosen optimizer.

    For one that a feature brings it is the general class.
    """
    if not bringing(session, "--optimizer") and args.optimizer not in _CONFIGS:
        raise unknown(session, "--optimizer")
    kind = getattr(mcore_optimizer, _CONFIGS.get(args.optimizer, "OptimizerConfig"), OptimizerConfig)
    try:
        return kind(**config_values(kind, args))
    except (AssertionError, ValueError) as error:
        raise refused_configuration(args, session.provenance, error) from error


@hookimpl(trylast=True)
def build_optimizer(
    session: Session,
    args: Namespace,
    optimizer_config: OptimizerConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Build megatron-core's optimizer; norms and biases carry no weight decay (its standard rule).

    In place of one that a feature brings, its Adam.
    """
    options: dict[str, Any] = {}
    brought = bringing(session, "--optimizer")
    if brought:
        optimizer_config = copy.copy(optimizer_config)
        optimizer_config.optimizer = STAND_INS["--optimizer"][1]
    parameters = signature(get_megatron_optimizer).parameters
    overrides = getattr(mcore_optimizer, "get_standard_config_overrides", None)
    if overrides is not None and "config_overrides" in parameters:
        options["config_overrides"] = overrides(config=optimizer_config)
    optimizer = get_megatron_optimizer(
        config=optimizer_config,
        model_chunks=model,
        use_gloo_process_groups=args.enable_gloo_process_groups,
        **options,
    )
    if args.use_megatron_fsdp and args.data_parallel_sharding_strategy == "no_shard":
        # Every rank holds all gradients; megatron-core would sum their norm over the data-parallel ranks.
        optimizer.grad_stats_parallel_group = pg.mp
    if brought:
        stands_in(session, optimizer)
    return optimizer


@hookimpl(trylast=True)
def build_scheduler(
    session: Session, args: Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Build megatron-core's schedule of the learning rate, counted in samples as in Megatron-LM.

    In place of one that a feature brings, its constant one.
    """
    brought = bringing(session, "--lr-decay-style")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_steps,
        lr_decay_steps=args.lr_decay_steps,
        lr_decay_style=STAND_INS["--lr-decay-style"][1] if brought else args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.wd_incr_steps,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=args.wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


@hookimpl(trylast=True)
def optimizer_step(run: Run) -> OptimizerStep:
    """Clip and update, and agree with the other model-parallel ranks whether it succeeded."""
    assert run.optimizer is not None
    successful, grad_norm, num_zeros = run.optimizer.step()
    if run.dist.world_size == 1 or run.pg.mp.size() == 1:
        norm = None if grad_norm is None else float(grad_norm)
        return OptimizerStep(bool(successful), norm, None if num_zeros is None else int(num_zeros))
    # A rank whose stage is frozen has no norm; the others' counts for all.
    local = [not successful, *(-1.0 if value is None else float(value) for value in (grad_norm, num_zeros))]
    # megatron-core computes both numbers in float32; HCCL reduces no float64.
    facts = torch.tensor(local, dtype=torch.float32, device=run.dist.device)
    dist.all_reduce(facts, op=dist.ReduceOp.MAX, group=run.pg.mp)
    failed, norm, zeros = facts.tolist()
    return OptimizerStep(failed == 0.0, None if norm < 0 else norm, None if zeros < 0 else int(zeros))
