"""Default arguments, place in the world, and process groups of a library session: those of the program."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from mindspeed_core.feature import hookimpl
from mindspeed_core.run import DistInfo
from mindspeed_megatron.config_arguments import DERIVED

if TYPE_CHECKING:
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_megatron.hosts.library.session import LibrarySession


@hookimpl(trylast=True)
def validate_arguments(session: LibrarySession, args: Namespace) -> Namespace:
    """Add what features find in every host: the place of this process, sizes and dtypes."""
    args.rank, args.world_size, args.local_rank = session.place_in_world()
    across = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    args.data_parallel_size = max(1, args.world_size // across)
    if parallel_state.model_parallel_is_initialized():
        args.data_parallel_size = parallel_state.get_data_parallel_world_size()
    dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    derived = {"params_dtype": dtype, "pipeline_dtype": dtype, "virtual_pipeline_model_parallel_size": None}
    for name in DERIVED:
        if not hasattr(args, name):
            setattr(args, name, derived[name])
    return args


@hookimpl(trylast=True)
def init_distributed(args: Namespace, platform: Platform) -> DistInfo:
    """Describe what the caller initialized."""
    return DistInfo(
        rank=args.rank,
        world_size=args.world_size,
        local_rank=args.local_rank,
        backend=dist.get_backend() if dist.is_initialized() else platform.backend,
        device=platform.device(args.local_rank),
    )


@hookimpl(trylast=True)
def build_process_groups(session: LibrarySession) -> ProcessGroupCollection:
    """Return the caller's groups, or those in megatron-core's globals."""
    return session.given("build_process_groups") or ProcessGroupCollection.use_mpu_process_groups()
