"""Marks of tensor parallelism on parameters, compared with how a checkpoint describes the same parameters.

megatron-core counts a parameter in the gradient norm on the first tensor-parallel rank alone, unless the
parameter is marked as a part. A part without the mark (learnable attention sinks of megatron-core are cut by
heads and have none) is missing from the norm that gradients are clipped by. What a rank holds of a parameter
stands in the model's sharded description too, which names no values and costs no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

_MARK = "tensor_model_parallel"


def settle_marks(session: Session, model: Iterable[Any], config: TransformerConfig) -> None:
    """Mark the parameters of built chunks that are parts of whole ones and lack the mark.

    Args:
        session: the open session.
        model: chunks, wrapped or not.
        config: of the model.
    """
    if config.tensor_model_parallel_size == 1:
        return
    for chunk in model:
        module = unwrap(chunk)
        if not hasattr(module, "sharded_state_dict"):
            continue
        unmarked = {
            id(parameter): parameter
            for parameter in module.parameters()
            if parameter.requires_grad and not getattr(parameter, _MARK, False)
        }
        # Without candidates nothing needs to be described.
        for described in _described(module) if unmarked else ():
            parameter = unmarked.get(id(described.data))
            axis = None if parameter is None or _is_copy(described) else _cut_axis(described)
            if axis is not None:
                for name, value in ((_MARK, True), ("partition_dim", axis), ("partition_stride", 1)):
                    setattr(parameter, name, value)


def _described(module: Any) -> Iterator[Any]:
    """Yield the description of every parameter that a module has."""
    # Predictions of further tokens on a stage of their own ask for the group, and have no default of it.
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    waiting: list[Any] = [module.sharded_state_dict(metadata={"dp_cp_group": group})]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (ShardedTensor, ShardedTensorFactory)):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


def _is_copy(described: Any) -> bool:
    """Return whether another rank of the model's copy has the same part, as on grids of ranks."""
    replica = described.replica_id
    # The last number tells data-parallel ranks apart, which count all.
    return isinstance(replica, tuple) and any(replica[:-1])


def _cut_axis(described: Any) -> int | None:
    """Return the axis along which ranks hold parts of a parameter; None for none."""
    if isinstance(described, ShardedTensorFactory):
        # A description of parts in an order of its own is made from the tensor; nothing needs its values.
        like = torch.empty_like(described.data, device="meta")
        built = described.build_fn(
            described.key, like, described.replica_id, getattr(described, "flattened_range", None)
        )
        axes = [_cut_axis(part) for part in (built.values() if isinstance(built, dict) else built)]
        return next((axis for axis in axes if axis is not None), None)
    first = described.prepend_axis_num
    fragments = described.axis_fragmentations
    for axis, size in enumerate(described.local_shape):
        whole = described.global_shape[first + axis]
        if (fragments is None or fragments[first + axis] > 1) and size != whole:
            return axis
    return None
