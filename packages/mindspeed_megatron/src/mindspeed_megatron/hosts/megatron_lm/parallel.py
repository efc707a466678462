"""Validation, start of torch.distributed, process groups and seeds: interceptions and defaults."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import DistInfo, RngInfo
from mindspeed_core.runtime.process_groups import look_for_unclean_ends
from mindspeed_core.session import current
from mindspeed_megatron.data_source import check_only_source
from mindspeed_megatron.hosts.megatron_lm import pretrain_call
from mindspeed_megatron.hosts.megatron_lm.flag_ownership import stand_in
from mindspeed_megatron.hosts.megatron_lm.pretrain_call import PretrainCall, intercepts
from mindspeed_megatron.launch.meeting import TIMEOUT, meet_ranks
from mindspeed_megatron.rank_check import check_ranks
from mindspeed_megatron.seeds import seed_generators, seed_of_rank

if TYPE_CHECKING:
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def validate_arguments(session: Session, args: Namespace) -> Namespace:
    """Let Megatron-LM validate; it switches micro-batches of different lengths off whatever was given."""
    check_only_source(session, args)
    variable = bool(getattr(args, "variable_seq_lengths", False))
    validated: Namespace = pretrain_call.current().pending("validate_arguments")(args)
    validated.variable_seq_lengths = variable
    if variable and not getattr(validated, "num_experts", None):
        # megatron-core refuses the default dispatcher, also where there is nothing to dispatch.
        validated.moe_token_dispatcher_type = "alltoall"
    return validated


@intercepts()
def around_initialize_distributed(
    now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Intercept ``_initialize_distributed``: starts torch.distributed, and the process groups within."""
    session = now.session
    with now.calling("init_distributed", lambda: original(*args, **named)) as call:
        session.call("init_distributed", args=session.args, platform=session.platform)
    return call.result


def meet(args: Namespace) -> None:
    """Let the ranks meet before Megatron-LM starts torch.distributed, so that who does not come is named.

    Megatron-LM's own start finds the store served. Where the script brings a store, ranks meet there.
    """
    own_store = getattr(args, "fake_process_group", False) or getattr(args, "inprocess_restart", False)
    dry_run = current().platform.dry_run
    if (
        own_store
        or dry_run
        or args.world_size < 2
        or dist.is_initialized()
        or "MASTER_ADDR" not in os.environ
    ):
        return
    minutes = getattr(args, "distributed_timeout_minutes", None) or TIMEOUT.total_seconds() / 60
    meet_ranks(timedelta(minutes=minutes), flag="--distributed-timeout-minutes")


@hookimpl(trylast=True)
def init_distributed(session: Session) -> DistInfo:
    """Let Megatron-LM start torch.distributed; it builds the process groups too."""
    pretrain_call.current().pending("init_distributed")()
    return _dist_info(session)


@intercepts()
def around_initialize_model_parallel(
    now: PretrainCall, original: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Intercept ``initialize_model_parallel``: ranks are compared first."""
    if now.call("build_process_groups") is not None:
        # A feature may build groups with sizes of its own.
        return original(*args, **named)
    session = now.session
    now.dist = _dist_info(session)
    check_ranks(session, now.dist)
    look_for_unclean_ends()
    stand_in(session)
    options = {**named, **session.call("process_group_options", args=session.args)}
    with now.calling("build_process_groups", lambda: original(*args, **options)) as call:
        session.call("build_process_groups", args=session.args, dist_info=now.dist)
    return call.result


@hookimpl(trylast=True)
def build_process_groups() -> ProcessGroupCollection:
    """Build megatron-core's groups, with the sizes that Megatron-LM asks for."""
    if not parallel_state.model_parallel_is_initialized():
        pretrain_call.current().pending("build_process_groups")()
    return ProcessGroupCollection.use_mpu_process_groups()


def seed_before_model(now: PretrainCall) -> None:
    """Seed the generators anew before the first chunk is built, where a feature or the platform asks for it.

    Compiling in between has drawn from the device's generator, which on CPU also initializes parameters.
    """
    session = now.session
    if now.seeded or not (now.wants("seed_everything") or session.platform.device_type == "cpu"):
        return
    now.seeded = True
    session.call("seed_everything", args=session.args, pg=ProcessGroupCollection.use_mpu_process_groups())


@hookimpl(trylast=True)
def seed_everything(args: Namespace, pg: ProcessGroupCollection) -> RngInfo:
    """Seed by Megatron-LM's rule."""
    seed = seed_of_rank(args, pg)
    seed_generators(seed, args.te_rng_tracker, args.inference_rng_tracker)
    return RngInfo(seed=args.seed, model_parallel_seed=seed)


def _dist_info(session: Session) -> DistInfo:
    args = session.args
    local_rank = getattr(args, "local_rank", 0) or 0
    return DistInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        backend=str(args.distributed_backend),
        device=session.platform.device(local_rank),
    )
