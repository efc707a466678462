"""Megatron-FSDP, megatron-core's own fully sharded data parallelism, in place of its gradient buffers.

megatron-core decides what is sharded together and when it is gathered; here is what it leaves open or does
wrongly: ranks that share a parameter with nobody, unsharded parameters, and how weights get in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.extensions.transformer_engine import TELinear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from mindspeed_core.discovery.installed import installed_version
from mindspeed_core.errors import ArgumentError
from mindspeed_megatron.fully_sharded.parts import describe_themselves

if TYPE_CHECKING:
    from mindspeed_core.session import Session


class MegatronShardedChunk(FullyShardedDataParallel):
    """A model chunk whose parameters, gradients and optimizer state Megatron-FSDP shards.

    What differs from megatron-core 0.16.1's class, which is used unchanged otherwise:

    - A buffer whose group is a single rank (experts on as many ranks as there are) is scaled once per step;
      its own reduction doubles and scales what has been accumulated with every micro-batch.
    - With the strategy ``no_shard`` nothing is gathered after the update; its own class asks buffers that do
      not exist.
    - Tensor parallelism works without TransformerEngine, whose linear its own class tests every module for,
      and random states of tensor-parallel ranks stay apart.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: MegatronModule,
        **options: Any,
    ) -> None:
        """Shard the module; see megatron-core's class."""
        super().__init__(config=config, ddp_config=ddp_config, module=module, **options)
        groups = self.param_and_grad_buffer.parameter_groups
        buffers = [group.main_grad_buffer for group in groups]
        self._alone = {
            index
            for index, buffer in enumerate(buffers)
            if buffer is not None and buffer.data_parallel_group.size() == 1
        }
        if self._alone and ddp_config.overlap_grad_reduce:
            pipeline = self.module.grad_reduce_pipeline
            pipeline._bucket_group_gradient_reduce = partial(
                self._reduce, pipeline._bucket_group_gradient_reduce
            )
            self.finish_grad_sync = self._finish_grad_sync
        if ddp_config.data_parallel_sharding_strategy == "no_shard":
            self.start_param_sync = self._use_whole_parameters

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Do nothing: parameters are gathered by hooks that stay in place."""

    def enable_forward_pre_hook(self) -> None:
        """Do nothing, as `disable_forward_pre_hook`."""

    def hold_parts(self) -> None:
        """Let the module's parameters be this rank's parts, which the optimizer updates."""
        self.module._replace_param_with_distributed_if_needed()

    @torch.no_grad()
    def take_over_parts(self) -> None:
        """Bring parts that were set from outside into what the forward pass uses."""
        self.module.install_optimized_model_weights()
        strategy = self.ddp_config.data_parallel_sharding_strategy
        if strategy == "optim_grads_params":
            # What was gathered before is given up; the next forward pass gathers anew.
            self.module.synchronize_param_gather()
        elif strategy != "no_shard":
            self.module.start_param_sync(force_sync=True)

    def sync_rng_states_across_tp_group(self) -> None:
        """Do nothing: weights are drawn already, and tensor-parallel ranks must not drop out alike."""

    def _fix_tensor_parallel_attributes(self, module: torch.nn.Module) -> None:
        if isinstance(TELinear, type):
            super()._fix_tensor_parallel_attributes(module)
            return
        several = parallel_state.get_tensor_model_parallel_world_size() > 1
        parameter: Any
        for name, parameter in module.named_parameters():
            # Column- and row-parallel layers have said how they are cut; routers are alike on all ranks.
            if several and name.endswith(".router.weight"):
                parameter._mcore_tp = parameter._tp_duplicated = True

    def _use_whole_parameters(self, *unused: Any, **options: Any) -> None:
        self.module._replace_param_with_raw_if_needed()

    def _reduce(self, shared: Callable[..., bool], bucket_group: list[int], **options: Any) -> bool:
        if not self._alone.issuperset(bucket_group):
            return shared(bucket_group, **options)
        for index in bucket_group:
            self.module.grad_reduce_pipeline.bucket_grad_ready_params[index] = set()
        return True

    def _finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        for index in self._alone:
            buffer = self.param_and_grad_buffer.parameter_groups[index].main_grad_buffer
            if buffer.gradient_scaling_factor is not None:
                buffer.data *= buffer.gradient_scaling_factor
        self.module.finish_grad_sync(force_all_reduce)


def has_known_faults() -> bool:
    """Return whether the installed class is of megatron-core up to 0.17, whose faults are corrected here."""
    return hasattr(FullyShardedDataParallel, "_fix_tensor_parallel_attributes")


def wrap_megatron_sharded(
    session: Session,
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> list[MegatronModule]:
    """Shard every chunk over the data-parallel (and context-parallel) ranks, experts over their own.

    Raises:
        ArgumentError: megatron-core's class is one whose faults are others.
    """
    if not has_known_faults():
        raise ArgumentError(
            "--use-megatron-fsdp",
            None,
            f"its corrections are those for megatron-core up to 0.17, and "
            f"{installed_version('megatron-core')} is installed",
            "use --use-torch-fsdp2 or --use-distributed-optimizer, or install megatron-core 0.16.1",
        )
    if session.platform.backend != "nccl":
        # The fused division is an operation of NCCL.
        ddp_config.gradient_reduce_div_fusion = False
    wrapped = []
    for index, chunk in enumerate(model):
        sharded = MegatronShardedChunk(
            config=config,
            ddp_config=ddp_config,
            module=chunk,
            disable_bucketing=index > 0,
            device=session.platform.device(session.args.local_rank),
            pg_collection=pg,
        )
        describe_themselves(sharded)
        wrapped.append(sharded)
    return wrapped
