"""Fully sharded data parallelism: torch's ``fully_shard`` in place of megatron-core's gradient buffers.

megatron-core's wrapper decides what is sharded together; here is what it leaves open: how its gradients are
finished, and how weights get into sharded parameters.
"""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from torch.distributed.tensor import DTensor

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Patch

if TYPE_CHECKING:
    from mindspeed_core.session import Session


class FullyShardedChunk(TorchFullyShardedDataParallel):
    """A model chunk whose parameters torch gathers for each use, and whose gradients it reduces."""

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce nothing; megatron-core's own class does not take the argument that it passes."""


def sharding_config(args: Namespace) -> DistributedDataParallelConfig:
    """Return the options of the wrapper."""
    return TorchFullyShardedDataParallelConfig(reshard_after_forward=args.torch_fsdp2_reshard_after_forward)


def wrap_fully_sharded(
    session: Session,
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
    if config.gated_linear_unit and size > 1 and size % 2:
        raise UserError(
            f"--use-torch-fsdp2: {size} data-parallel ranks cut a gated layer across its two halves, which "
            "checkpoints do not describe; use an even number of data-parallel ranks"
        )
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if parameter.shape[0] % size:
                raise UserError(
                    f"--use-torch-fsdp2: {name} has {parameter.shape[0]} rows, which {size} data-parallel "
                    "ranks do not share equally; use another number of ranks, or other sizes"
                )
    session.ledger.apply([_LOCAL_PART], owner=session.host.name)
    wrapped = [
        FullyShardedChunk(config=config, ddp_config=ddp_config, module=chunk, process_group=pg.dp_cp)
        for chunk in model
    ]
    for chunk in wrapped:
        for module in chunk.module.modules():
            module.register_load_state_dict_pre_hook(_take_own_shard)
            if isinstance(module, MLP) and config.gated_linear_unit and size > 1:
                module.sharded_state_dict = MethodType(partial(_gated_shards, pg), module)
    return wrapped


def _gated_shards(
    pg: ProcessGroupCollection,
    mlp: MLP,
    prefix: str = "",
    sharded_offsets: tuple[tuple[int, int, int], ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Give the ``sharded_state_dict`` of a gated MLP, whose first weight holds the gate above the other half.

    megatron-core describes every rank's part as one half over the other, which is so under tensor
    parallelism; a part cut by torch is a range of rows of the whole, in one of the halves.
    """
    described: dict[str, Any] = type(mlp).sharded_state_dict(mlp, prefix, sharded_offsets, metadata)
    half = pg.dp_cp.size() // 2
    tensor_parts, tensor_rank = pg.tp.size(), pg.tp.rank()
    lower, place = divmod(pg.dp_cp.rank(), half)
    index = lower * half * tensor_parts + tensor_rank * half + place
    axis = len(sharded_offsets)
    for name in ("weight", "bias"):
        factory = described.get(f"{prefix}linear_fc1.{name}")
        if factory is not None:
            described[f"{prefix}linear_fc1.{name}"] = ShardedTensor.from_rank_offsets(
                factory.key,
                factory.data,
                *sharded_offsets,
                (axis, index, 2 * half * tensor_parts),
                replica_id=factory.replica_id,
                prepend_axis_num=axis,
            )
    return described


def _take_own_shard(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Loaded tensors are this rank's part already; say so, or torch takes them for whole ones."""
    for name, parameter in module._parameters.items():
        if prefix + name in state:
            state[prefix + name] = as_part_of(parameter, state[prefix + name])


def as_part_of(parameter: Any, loaded: Any) -> Any:
    """Make a loaded tensor the part of a sharded parameter that it is; leave anything else.

    Args:
        parameter: a parameter, sharded or not.
        loaded: a tensor of the shape of the parameter's local part, in any dtype.
    """
    if not isinstance(parameter, DTensor) or isinstance(loaded, DTensor) or not torch.is_tensor(loaded):
        return loaded
    if loaded.shape != parameter._local_tensor.shape:
        return loaded
    return DTensor.from_local(
        loaded.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def local_part(tensor: Any) -> Any:
    """Do as ``megatron.core.utils.to_local_if_dtensor``, but return the same object at every call.

    Checkpointing finds an optimizer's parameters by the identity of their parts; torch returns a new view of
    them at every call.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


_LOCAL_PART = Patch(
    target="megatron.core.utils:to_local_if_dtensor",
    new=f"{__name__}:local_part",
    reason="an optimizer's parameters are found by the identity of their parts",
)
