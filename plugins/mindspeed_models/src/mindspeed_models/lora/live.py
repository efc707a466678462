"""Whole tensors into the adapters of a built model, whatever its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from mindspeed_core.errors import UserError
from mindspeed_megatron.model_state import model_keys
from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run


@torch.no_grad()
def fill_adapters(
    run: Run, tensors: Mapping[str, Tensor], where: str, *, lacking_is_zero: bool = False
) -> None:
    """Give everything that trains its part of whole tensors.

    Args:
        run: the run.
        tensors: by key in checkpoints; rows that pad a vocabulary may be missing.
        where: they come from, for messages.
        lacking_is_zero: what is not among them becomes zero.

    Raises:
        UserError: an adapter of the model is not among them, or has another shape.
    """
    metadata = {"singleton_local_shards": False, "non_homogeneous_layers": True, "dp_cp_group": run.pg.dp_cp}
    state = run.session.call("model_state", run=run, source=None, metadata=metadata)
    for key, chunk in zip(model_keys(run), run.model):
        values = {name: _value(entry, tensors, where, lacking_is_zero) for name, entry in state[key].items()}
        unwrap(chunk).load_state_dict(values, strict=False)
    if run.optimizer is not None:
        run.optimizer.reload_model_params()


def _value(entry: Any, tensors: Mapping[str, Tensor], where: str, lacking_is_zero: bool) -> Any:
    if isinstance(entry, ShardedTensorFactory):
        return entry.merge_fn(_value(entry.build(), tensors, where, lacking_is_zero))
    if isinstance(entry, dict):
        return {name: _value(part, tensors, where, lacking_is_zero) for name, part in entry.items()}
    if isinstance(entry, (list, tuple)):
        return [_value(part, tensors, where, lacking_is_zero) for part in entry]
    assert isinstance(entry, ShardedTensor)
    whole = tensors.get(entry.key)
    if whole is None and lacking_is_zero:
        return entry.data.new_zeros(entry.local_shape)
    if whole is None:
        raise UserError(
            f"{where}: has nothing for {entry.key}, which trains here; name the same linears and modules"
        )
    shape, offset = tuple(entry.local_shape), tuple(entry.global_offset)[entry.prepend_axis_num :]
    expected = tuple(entry.global_shape)[entry.prepend_axis_num :]
    padded = entry.allow_shape_mismatch and whole.shape[1:] == expected[1:] and len(whole) <= expected[0]
    if tuple(whole.shape) != expected and not padded:
        raise UserError(
            f"{where}: {entry.key} has the shape {list(whole.shape)}, this model {list(expected)}"
        )
    part = whole[tuple(slice(at, at + size) for at, size in zip(offset, shape))]
    found = entry.data.new_zeros(shape)
    found[tuple(slice(0, size) for size in part.shape)] = part.to(found)
    return found
