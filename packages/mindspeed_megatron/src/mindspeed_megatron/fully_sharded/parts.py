"""Parameters that Megatron-FSDP has cut, in the words of checkpoints that other layouts read.

megatron-core describes whole parameters: their keys, their place among tensor, pipeline and expert ranks. A
rank's part under Megatron-FSDP is a range of rows of such a parameter, of any length and possibly empty. Here
the description of the whole is cut to that range, so that what is saved does not tell how it was sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.unwrap import unwrap


def describe_themselves(chunk: Any) -> None:
    """Make the model inside a sharded chunk describe, and load, this rank's parts.

    Args:
        chunk: a chunk with ``hold_parts`` and ``take_over_parts``; its model gets its own
            ``sharded_state_dict`` and hooks that load by what that described.
    """
    model = unwrap(chunk)

    def sharded_state_dict(
        self: Any,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        chunk.hold_parts()
        return described(self, _model_value, prefix=prefix, offsets=sharded_offsets, metadata=metadata)

    model.sharded_state_dict = MethodType(sharded_state_dict, model)
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_take_own_part)
    model.register_load_state_dict_pre_hook(lambda *unused: chunk.hold_parts())
    model.register_load_state_dict_post_hook(lambda *unused: chunk.take_over_parts())


def described(
    model: Any,
    value: Callable[[Any], torch.Tensor | None],
    *,
    prefix: str = "",
    offsets: tuple[tuple[int, int, int], ...] = (),
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the sharded state of a model whose parameters are parts.

    Args:
        model: the model, its parameters being parts.
        value: gives what is described in a part's place, in the shape of the part or, replicated, of the
            whole parameter; None where this rank has nothing of it.
        prefix: of the keys.
        offsets: of the axes that are put in front.
        metadata: how state is laid out, see ``layout_metadata``.
    """
    parts = dict(model.named_parameters(remove_duplicate=False))
    with _whole(model):
        state = type(model).sharded_state_dict(model, prefix, offsets, metadata)
    return {
        name: _cut(entry, parts[name.removeprefix(prefix)], value)
        if name.removeprefix(prefix) in parts
        else entry
        for name, entry in state.items()
    }


def with_data(entry: ShardedTensor | ShardedTensorFactory, data: torch.Tensor) -> Any:
    """Return the description of another tensor of the same shape, in any dtype."""
    if isinstance(entry, ShardedTensor):
        return replace(entry, data=data, dtype=data.dtype)
    return replace(entry, data=data)


def rows_held(part: Any) -> tuple[int, int]:
    """First row, and the row behind the last, that a part holds of its parameter; of dimension 0."""
    width = _width(part.orig_param.shape)
    held = getattr(part, "megatron_fsdp_slice", None)
    first = 0 if held is None else held.start // width
    return first, first + part._local_tensor.shape[0]


def _width(shape: torch.Size) -> int:
    return max(1, shape[1:].numel())


def _model_value(part: Any) -> torch.Tensor:
    # The part is of the float32 copy; the model itself is trained, and saved, in its own dtype.
    return part._local_tensor.detach().to(part.orig_param.dtype)


@contextmanager
def _whole(model: Any) -> Iterator[None]:
    """Put stand-ins of the whole parameters, without memory, in the places of the parts."""
    places: list[tuple[dict[str, Any], str, Any]] = []
    stand_ins: dict[int, torch.nn.Parameter] = {}
    try:
        for module in model.modules():
            for name, part in module._parameters.items():
                if part is None:
                    continue
                if id(part) not in stand_ins:
                    whole = part.orig_param
                    empty = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
                    stand_ins[id(part)] = torch.nn.Parameter(empty, requires_grad=False)
                places.append((module._parameters, name, part))
                module._parameters[name] = stand_ins[id(part)]
        yield
    finally:
        for parameters, name, part in places:
            parameters[name] = part


def _cut(whole: Any, part: Any, value: Callable[[Any], torch.Tensor | None]) -> Any:
    data = value(part)
    if data is None:
        return LocalNonpersistentObject(None)
    if data.shape == part.orig_param.shape != part._local_tensor.shape:
        return with_data(whole, data)
    own = rows_held(part)
    if isinstance(whole, ShardedTensor):
        pieces = [whole]
    elif isinstance(whole, ShardedTensorFactory):
        pieces = list(_sharded_tensors(whole.build()))
    else:
        return whole
    own_pieces = [cut for piece in pieces if (cut := _piece(piece, part, own, data)) is not None]
    if not own_pieces:
        return LocalNonpersistentObject(data)
    if isinstance(whole, ShardedTensor):
        return own_pieces[0]
    return ShardedTensorFactory(
        whole.key, data, partial(_built, own_pieces), partial(_merged, data.shape), own_pieces[0].replica_id
    )


def _piece(whole: ShardedTensor, part: Any, own: tuple[int, int], data: torch.Tensor) -> ShardedTensor | None:
    """Return the rows of a whole tensor, or of one half of a gated one, that are this rank's."""
    shape, width = part.orig_param.shape, _width(part.orig_param.shape)
    seen = whole.data
    if seen.shape[1:] != shape[1:] or not seen.is_contiguous() or seen.storage_offset() % width:
        raise CheckpointError(f"{whole.key}: its layer does not describe it by rows, by which it is sharded")
    first = seen.storage_offset() // width
    start, stop = max(own[0], first), min(own[1], first + seen.shape[0])
    if start >= stop:
        return None
    rows = data[start - own[0] : stop - own[0]]
    axis = whole.prepend_axis_num
    place = list(whole.global_offset)
    place[axis] += start - first
    # megatron-core does not read back parts of unequal length with axes in front of their own.
    local_shape = (*(1 for _ in range(axis)), *rows.shape)
    return replace(
        whole,
        data=rows.reshape(local_shape),
        dtype=rows.dtype,
        local_shape=local_shape,
        global_offset=tuple(place),
        axis_fragmentations=None,
        prepend_axis_num=0,
        replica_id=_replica(whole.replica_id, part),
    )


def _replica(replica: Any, part: Any) -> Any:
    """Data-parallel ranks hold copies of a whole parameter, and nobody a copy of a part."""
    if getattr(part, "megatron_fsdp_slice", None) is None:
        return replica
    return (*replica[:-1], 0)


def _sharded_tensors(built: Any) -> Iterator[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        yield built
    else:
        for item in built.values() if isinstance(built, Mapping) else built:
            yield from _sharded_tensors(item)


def _built(pieces: list[ShardedTensor], key: str, data: Any, replica: Any, flat: Any) -> list[ShardedTensor]:
    return [replace(piece, key=key) for piece in pieces]


def _merged(shape: torch.Size, loaded: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.reshape(-1, *shape[1:]) for piece in loaded])


@torch.no_grad()
def _take_own_part(module: Any, state: dict[str, Any], prefix: str, *unused: Any) -> None:
    """Copy loaded rows into the parts; what torch then copies is each part onto itself."""
    for name, part in module._parameters.items():
        loaded = state.get(prefix + name)
        if part is None or loaded is None:
            continue
        take(part, loaded)
        state[prefix + name] = part


@torch.no_grad()
def take(part: Any, loaded: Any) -> None:
    """Copy what was loaded by a description of `described` into a part; nothing where there was none."""
    if isinstance(loaded, torch.Tensor):
        own = part._local_tensor
        own.copy_(loaded.reshape(own.shape))
