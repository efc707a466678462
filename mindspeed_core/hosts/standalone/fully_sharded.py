"""Fully sharded data parallelism: torch's ``fully_shard`` in place of megatron-core's gradient buffers.

megatron-core's wrapper decides what is sharded together; here is what it leaves open: how its gradients are
finished, and how weights get into sharded parameters.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.distributed.tensor import DTensor

from mindspeed_core.errors import UserError


class FullyShardedChunk(TorchFullyShardedDataParallel):
    """A model chunk whose parameters torch gathers for each use and whose gradients it reduces in backward."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Nothing is left to reduce; megatron-core 0.16 passes an argument that its own class does not take."""


def sharding_config(args: Namespace) -> DistributedDataParallelConfig:
    """Options of the wrapper."""
    return TorchFullyShardedDataParallelConfig(reshard_after_forward=args.torch_fsdp2_reshard_after_forward)


def wrap_fully_sharded(
    config: TransformerConfig,
    ddp_config: DistributedDataParallelConfig,
    model: list[MegatronModule],
    pg: ProcessGroupCollection,
) -> list[MegatronModule]:
    """Shard every chunk over the data-parallel (and context-parallel) ranks.

    Raises:
        UserError: a parameter cannot be cut into equal parts, the only ones that checkpoints describe.
    """
    size = pg.dp_cp.size()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if parameter.shape[0] % size:
                raise UserError(
                    f"--use-torch-fsdp2: {name} has {parameter.shape[0]} rows, which {size} data-parallel ranks do not "
                    "share equally; use another number of ranks, or other sizes"
                )
    wrapped = [
        FullyShardedChunk(
            config=config, ddp_config=ddp_config, module=chunk, process_group=pg.dp_cp
        )
        for chunk in model
    ]
    for chunk in wrapped:
        for module in chunk.module.modules():
            module.register_load_state_dict_pre_hook(_take_own_shard)
    return wrapped


def _take_own_shard(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Loaded tensors are this rank's part already; say so, or torch takes them for whole ones."""
    for name, parameter in module._parameters.items():
        loaded = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or loaded is None or isinstance(loaded, DTensor):
            continue
        state[prefix + name] = DTensor.from_local(
            loaded.to(parameter.device),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
