"""Default start of torch.distributed, megatron-core's process groups, and the seeds."""

from __future__ import annotations

import os
from argparse import Namespace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mindspeed_core.errors import UserError
from mindspeed_core.feature import hookimpl
from mindspeed_core.run import DistInfo, RngInfo
from mindspeed_core.runtime.process_groups import (
    groups_are_spoiled,
    look_for_unclean_ends,
    remember_groups,
)
from mindspeed_megatron.environment import set_device_connections
from mindspeed_megatron.launch.meeting import meet_ranks
from mindspeed_megatron.seeds import seed_generators, seed_of_rank

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.session import Session

_GROUPS = "model parallel"


@hookimpl(trylast=True)
def init_distributed(session: Session, args: Namespace, platform: Platform) -> DistInfo:
    """Start the platform's backend from the environment that torchrun (or Slurm) set."""
    set_device_connections(session, args)
    platform.set_device(args.local_rank)
    if not dist.is_initialized():
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        if args.world_size == 1 or platform.dry_run:
            # A process without peers needs no rendezvous and opens no port.
            dist.init_process_group(
                platform.backend,
                store=dist.HashStore(),
                rank=args.rank,
                world_size=args.world_size,
                timeout=timeout,
            )
        else:
            meeting = meet_ranks(timeout, flag="--distributed-timeout-minutes")
            try:
                dist.init_process_group(
                    platform.backend,
                    store=meeting.store,
                    rank=meeting.rank,
                    world_size=meeting.world_size,
                    timeout=timeout,
                )
            except (ValueError, RuntimeError) as error:
                raise UserError(
                    f"rank {meeting.rank} of {meeting.world_size}: all ranks met, but {platform.backend} "
                    "could not connect them; look at the first error in the output of each rank, and check "
                    "that the hosts reach each other on every port of the interface that the backend uses "
                    "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, HCCL_SOCKET_IFNAME); --traceback shows what "
                    f"{platform.backend} said"
                ) from error
    return DistInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=args.local_rank,
        backend=platform.backend,
        device=platform.device(args.local_rank),
    )


@hookimpl(trylast=True)
def build_process_groups(session: Session, args: Namespace) -> ProcessGroupCollection:
    """Build megatron-core's groups, in its default order tp-cp-ep-dp-pp, or with data parallelism last."""
    # All ranks have met in this session: none of them still has to close the one before.
    look_for_unclean_ends()
    if groups_are_spoiled(_GROUPS):
        parallel_state.destroy_model_parallel()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=args.enable_gloo_process_groups,
            **session.call("process_group_options", args=args),
        )
        remember_groups(_GROUPS)
    return ProcessGroupCollection.use_mpu_process_groups()


@hookimpl(trylast=True)
def seed_everything(session: Session, args: Namespace, pg: ProcessGroupCollection) -> RngInfo:
    """Seed every generator by Megatron-LM's rule."""
    if args.deterministic_mode:
        _only_deterministic(session)
    seed = seed_of_rank(args, pg)
    seed_generators(seed)
    return RngInfo(seed=args.seed, model_parallel_seed=seed)


def _only_deterministic(session: Session) -> None:
    """Let torch choose reproducible algorithms, or raise where it has none, until the session closes."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    session.at_close(lambda: torch.use_deterministic_algorithms(before, warn_only=warns))
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        # Without it torch refuses deterministic matrix products on CUDA.
        session.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
