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
from mindspeed_core.launch.store import served_store
from mindspeed_core.megatron.environment import set_device_connections
from mindspeed_core.megatron.seeds import seed_generators, seed_of_rank
from mindspeed_core.run import DistInfo, RngInfo

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.session import Session


@hookimpl(trylast=True)
def init_distributed(session: Session, args: Namespace, platform: Platform) -> DistInfo:
    """Start the platform's backend from the environment that torchrun (or Slurm) set."""
    set_device_connections(session, args)
    platform.set_device(args.local_rank)
    if not dist.is_initialized():
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        if args.world_size == 1:
            # One process needs no rendezvous and opens no port.
            dist.init_process_group(
                platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
        else:
            try:
                rank, world_size = args.rank, args.world_size
                store = served_store(timeout)
                if store is None:
                    store, rank, world_size = next(
                        dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=timeout)
                    )
                # A process that closes a session and opens another meets its peers on the same store; the
                # addresses of the first meeting must not be taken for those of the second.
                meeting = store.add(f"mindspeed/meeting/{rank}", 1)
                dist.init_process_group(
                    platform.backend,
                    store=dist.PrefixStore(f"mindspeed/{meeting}", store),
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                )
            except (ValueError, dist.DistError) as error:
                raise UserError(
                    f"rank {args.rank} of {args.world_size} cannot join the process group: {error}; start "
                    "the job with torchrun, which sets MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE"
                ) from error
    return DistInfo(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=args.local_rank,
        backend=platform.backend,
        device=platform.device(args.local_rank),
    )


@hookimpl(trylast=True)
def build_process_groups(args: Namespace) -> ProcessGroupCollection:
    """Build megatron-core's groups, in its default order tp-cp-ep-dp-pp."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=args.tensor_model_parallel_size,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            distributed_timeout_minutes=args.distributed_timeout_minutes,
            create_gloo_process_groups=args.enable_gloo_process_groups,
        )
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
