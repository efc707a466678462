"""Defaults of the stages in a library session: what the caller handed in, or megatron-core's own part."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_core.hooks import DONE, Done
from mindspeed_core.hosts.library.config_arguments import DERIVED, with_arguments
from mindspeed_core.hosts.standalone import optimizer as parts_of_optimizer
from mindspeed_core.hosts.standalone.model import build
from mindspeed_core.megatron import layers
from mindspeed_core.run import Batch, BoundarySchema, DistInfo, Loss, OptimizerStep, StepResult

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
    from megatron.core.transformer.module import MegatronModule

    from mindspeed_core.hosts.library.session import LibrarySession
    from mindspeed_core.platforms.platform import Platform
    from mindspeed_core.run import Run


@hookimpl(trylast=True)
def validate_arguments_early(args: Namespace) -> Namespace:
    """Nothing to change."""
    return args


@hookimpl(trylast=True)
def validate_arguments(args: Namespace) -> Namespace:
    """Add what features find in every host: the place of this process, sizes and dtypes."""
    known = dist.is_available() and dist.is_initialized()
    args.world_size = dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", "1"))
    args.rank = dist.get_rank() if known else int(os.environ.get("RANK", "0"))
    args.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
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
    """What the caller initialized."""
    return DistInfo(
        rank=args.rank,
        world_size=args.world_size,
        local_rank=args.local_rank,
        backend=dist.get_backend() if dist.is_initialized() else platform.backend,
        device=platform.device(args.local_rank),
    )


@hookimpl(trylast=True)
def build_process_groups(session: LibrarySession) -> ProcessGroupCollection:
    """The caller's groups, or those in megatron-core's globals."""
    return session.given("build_process_groups") or ProcessGroupCollection.use_mpu_process_groups()


@hookimpl(trylast=True)
def build_transformer_config(session: LibrarySession, args: Namespace) -> TransformerConfig:
    """A copy of the caller's configuration, with what features changed of the arguments."""
    given, known, changed = session.given("build_transformer_config")
    # A feature that asks for the default again may have changed further arguments.
    later = {name for name, value in vars(args).items() if value is not known.get(name)}
    return with_arguments(given, args, changed | later)


@hookimpl(trylast=True)
def build_layer_spec(
    session: LibrarySession, args: Namespace, config: TransformerConfig, vp_stage: int | None
) -> TransformerBlockSubmodules:
    """The caller's specification as the whole tree of a chunk; without one megatron-core's GPT layers."""
    base = session.given("build_layer_spec")
    if base is None:
        return layers.build_layer_spec(args=args, config=config, vp_stage=vp_stage)
    if isinstance(base, TransformerBlockSubmodules):
        return base
    if not isinstance(base, ModuleSpec):
        raise SessionError(
            f"layer_spec: base is a {type(base).__name__}; pass a ModuleSpec of a layer or the "
            "TransformerBlockSubmodules of a chunk"
        )
    if isinstance(base.module, type) and issubclass(base.module, TransformerBlock):
        return base.submodules
    alone = config.pipeline_model_parallel_size == 1
    count = config.num_layers if alone else get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[base] * count, layer_norm=LayerNormImpl)


@hookimpl(trylast=True)
def build_model(session: LibrarySession) -> list[MegatronModule]:
    """The caller's chunks."""
    chunks: list[MegatronModule] = session.given("build_model")
    return chunks


@hookimpl(trylast=True)
def boundary_schema(args: Namespace, config: TransformerConfig) -> BoundarySchema:
    """One hidden state per micro-batch, as megatron-core's schedules have it."""
    return build.boundary_schema(args=args, config=config)


@hookimpl(trylast=True)
def build_ddp_config(session: LibrarySession) -> DistributedDataParallelConfig:
    """The caller's options."""
    config: DistributedDataParallelConfig = session.given("build_ddp_config")
    return config


@hookimpl(trylast=True)
def wrap_ddp(
    session: LibrarySession,
    args: Namespace,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> list[MegatronModule]:
    """megatron-core's DistributedDataParallel around every chunk."""
    return build.wrap_ddp(
        session=session, args=args, config=config, ddp_config=ddp_config, model=model, pg=pg
    )


@hookimpl(trylast=True)
def build_optimizer_config(session: LibrarySession) -> OptimizerConfig:
    """The caller's options."""
    config: OptimizerConfig = session.given("build_optimizer_config")
    return config


@hookimpl(trylast=True)
def build_optimizer(session: LibrarySession) -> MegatronOptimizer:
    """The caller's optimizer."""
    optimizer: MegatronOptimizer = session.given("build_optimizer")
    return optimizer


@hookimpl(trylast=True)
def optimizer_step(session: LibrarySession) -> OptimizerStep:
    """The caller's update."""
    step: Callable[[], OptimizerStep] = session.given("optimizer_step")
    return step()


@hookimpl(trylast=True)
def get_forward_backward() -> Callable[..., Any]:
    """megatron-core's schedule for the sizes in use."""
    return get_forward_backward_func()


@hookimpl(trylast=True)
def forward_step(
    session: LibrarySession,
    data_iterator: Iterator[Any],
    model_chunk: MegatronModule,
    return_schedule_plan: bool,
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """The caller's function."""
    function = session.given("forward_step")
    result: tuple[torch.Tensor, Callable[..., Any]] = (
        function(data_iterator, model_chunk, return_schedule_plan=True)
        if return_schedule_plan
        else function(data_iterator, model_chunk)
    )
    return result


@hookimpl(trylast=True)
def get_batch(session: LibrarySession) -> Batch:
    """The caller's batch."""
    batch: Batch = session.given("get_batch")
    return batch


@hookimpl(trylast=True)
def compute_loss(session: LibrarySession, output_tensor: torch.Tensor) -> Loss:
    """The caller's loss."""
    function: Callable[[torch.Tensor], Loss] = session.given("compute_loss")
    return function(output_tensor)


@hookimpl(trylast=True)
def finalize_gradients(
    session: LibrarySession,
    model: list[MegatronModule],
    num_tokens: torch.Tensor | None,
    pg: ProcessGroupCollection | None,
    force_all_reduce: bool,
) -> Done:
    """The caller's function, or megatron-core's reductions."""
    function = session.given("finalize_gradients")
    if function is None:
        return parts_of_optimizer.finalize_gradients(
            model=model, num_tokens=num_tokens, pg=pg, force_all_reduce=force_all_reduce
        )
    function(model, num_tokens)
    return DONE


@hookimpl(trylast=True)
def train_step(session: LibrarySession) -> StepResult:
    """The caller's step."""
    step: Callable[[], StepResult] = session.given("train_step")
    return step()


@hookimpl(trylast=True)
def log_step(session: LibrarySession, run: Run) -> dict[str, Any]:
    """The caller's numbers, and what features recorded since the last time."""
    numbers = {**session.given("log_step"), **run.metrics.reduce()}
    run.metrics.clear()
    return numbers


@hookimpl(trylast=True)
def before_save_checkpoint() -> Done:
    """Parameters and optimizer state are as the caller has them."""
    return DONE


@hookimpl(trylast=True)
def after_load_checkpoint() -> Done:
    """Parameters and optimizer state are as the caller has them."""
    return DONE


@hookimpl(trylast=True)
def start_run() -> Done:
    """Nothing to prepare."""
    return DONE


@hookimpl(trylast=True)
def finish_run() -> Done:
    """Nothing to tidy up."""
    return DONE
