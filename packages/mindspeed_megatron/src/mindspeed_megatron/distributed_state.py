"""The distributed optimizer's state as the pieces that each rank holds, in the form that any layout loads.

megatron-core gathers the state of all data-parallel ranks on each of them to describe whole tensors, several
times its size and all of it while training waits. A rank's part is a range of a flattened parameter, and such
a range is a few boxes of the parameter itself; described by boxes, the same tensors are saved under the same
keys without an exchange and without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.described_optimizer import for_a_save

FORMAT = "fully_reshardable"

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a box of a tensor."""


Pieces = dict[int, dict[str, list[ShardedTensor]]]
"""State of a rank by the number of the parameter and the name of the tensor."""


def held_pieces(inner: Any, model_state: Mapping[str, Any]) -> Pieces | None:
    """Return the state that this rank holds of a distributed optimizer, described for a save.

    Args:
        inner: megatron-core's ``DistributedOptimizer``, whose state exists.
        model_state: sharded state of the unwrapped chunks, built from the parameters themselves.

    Returns:
        None where a layer describes a parameter by something else than ranges of it; the same on all ranks
        that share the optimizer.
    """
    described, _ = extract_sharded_tensors_and_factories(dict(model_state))
    entries = {entry.data: entry for entry in nested_values(described)}
    ranges = {
        parameter: (held["param"].start, held["param"].end)
        for maps in inner.gbuf_ranges
        for buckets in maps.values()
        for bucket in buckets
        for parameter, held in bucket["param_map"].items()
    }
    pieces: Pieces = {}
    # Every parameter of the group is looked at, also those of which nothing is here: all ranks decide alike.
    for number, parameter in enumerate(p for buffer in inner.buffers for p in buffer.param_index_map):
        wholes = _ranges_of(entries[parameter], parameter) if parameter in entries else None
        if wholes is None:
            return None
        if parameter in ranges:
            pieces[number] = _pieces(inner, parameter, wholes, ranges[parameter])
    return pieces


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up a range of a flattened tensor, in the order of its elements.

    Args:
        shape: of the tensor.
        start: first element of the range.
        stop: the element behind its last.
    """
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    rest = tuple(shape[1:])
    width = math.prod(rest)
    first, last = -(-start // width), stop // width
    if first > last:
        yield from _in_row(last, rest, start - last * width, stop - last * width)
        return
    if start < first * width:
        yield from _in_row(first - 1, rest, start - (first - 1) * width, width)
    if first < last:
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(last, rest, 0, stop - last * width)


def _in_row(row: int, rest: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(rest, start, stop):
        yield (row, *offsets), (1, *sizes)


def _ranges_of(entry: Any, parameter: torch.Tensor) -> list[tuple[int, ShardedTensor]] | None:
    """Return the whole tensors that a parameter is saved as, each with its first element in the parameter."""
    if isinstance(entry, ShardedTensor):
        return [(0, entry)] if entry.data.shape == parameter.shape else None
    if not isinstance(entry, ShardedTensorFactory):
        return None
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    built = list(_sharded_tensors(replace(entry, data=stand_in).build()))
    found = []
    for whole in built:
        seen = whole.data
        inside = seen.untyped_storage()._cdata == stand_in.untyped_storage()._cdata
        if not (inside and seen.is_contiguous()):
            return None
        found.append((seen.storage_offset(), whole))
    found.sort(key=lambda item: item[0])
    ends = [0, *(start + whole.data.numel() for start, whole in found)]
    complete = [start for start, _ in found] == ends[:-1] and ends[-1] == parameter.numel()
    return found if complete else None


def _sharded_tensors(built: Any) -> Iterator[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        yield built
    else:
        for item in built.values() if isinstance(built, Mapping) else built:
            yield from _sharded_tensors(item)


def _pieces(
    inner: Any,
    parameter: torch.Tensor,
    wholes: Sequence[tuple[int, ShardedTensor]],
    held: tuple[int, int],
) -> dict[str, list[ShardedTensor]]:
    """Return what this rank has of a parameter and its moments, by the name of each."""
    pieces: dict[str, list[ShardedTensor]] = {}
    group, order = inner.model_param_group_index_map[parameter]
    shard = inner.optimizer.param_groups[group]["params"][order]
    for name, tensor in inner._get_main_param_and_optimizer_states(parameter).items():
        if name == "step":
            continue
        # What is made for the save leaves the device, where all of it would be as large as Adam's state.
        flat = for_a_save(tensor.detach().float().reshape(-1), shard, inner.optimizer.state[shard])
        if flat.numel() != held[1] - held[0]:
            raise CheckpointError(
                f"the optimizer keeps {name} of {flat.numel()} elements for a part of {held[1] - held[0]}: "
                f"{wholes[0][1].key}"
            )
        pieces[name] = [
            piece for begin, whole in wholes for piece in _cut(inner, name, whole, begin, flat, held)
        ]
    return pieces


def _cut(
    inner: Any, name: str, whole: ShardedTensor, begin: int, flat: torch.Tensor, held: tuple[int, int]
) -> Iterator[ShardedTensor]:
    start = max(held[0], begin)
    stop = min(held[1], begin + whole.data.numel())
    position = start - held[0]
    for offset, local_shape, count in _places(
        tuple(whole.data.shape),
        tuple(whole.global_offset),
        whole.prepend_axis_num,
        start - begin,
        stop - begin,
    ):
        # A copy without the checks of its form: they take longer than the copy of a small state.
        piece = object.__new__(ShardedTensor)
        vars(piece).update(
            vars(whole),
            key=f"optimizer.state.{name}.{whole.key}",
            data=flat[position : position + count].view(local_shape),
            dtype=flat.dtype,
            local_shape=local_shape,
            global_offset=offset,
            axis_fragmentations=None,
            prepend_axis_num=0,
            # Data-parallel ranks hold different parts; the instances of an optimizer hold the same.
            replica_id=(*whole.replica_id[:-1], inner.distributed_optimizer_instance_id),
        )
        yield piece
        position += count


@cache
def _places(
    shape: tuple[int, ...], global_offset: tuple[int, ...], axes: int, start: int, stop: int
) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
    """Return global offset, local shape and number of elements of each box of a range."""
    # megatron-core does not read back parts of unequal length with axes in front of their own.
    return tuple(
        (
            tuple(a + b for a, b in zip(global_offset, (0,) * axes + offsets)),
            (*(1 for _ in range(axes)), *sizes),
            math.prod(sizes),
        )
        for offsets, sizes in boxes(shape, start, stop)
    )


def every_rank_holds_parameters(inner: Any) -> bool:
    """Return whether each data-parallel rank holds a part of some parameter; the same on all of them."""
    ranks = inner.data_parallel_group.size()
    served: set[int] = set()
    for buffer in inner.buffers:
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // ranks
            for start, stop, number in buffer.param_index_map.values():
                if number == bucket.bucket_id and stop > start and share:
                    first, last = start - bucket.offset, stop - 1 - bucket.offset
                    served.update(range(first // share, last // share + 1))
    return len(served) == ranks
