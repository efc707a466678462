"""Places of the tensors that an inner optimizer updates, in the parameters of the model.

An update rule sees tensors: with the distributed optimizer a flat range of a parameter, that begins and ends
anywhere, and with fully sharded data parallelism some of its rows. Rules that look beyond single elements
(blocks of 128, whole matrices) need to know where such a tensor lies in its parameter, and who has the rest.
Both are computed from how megatron-core shards; nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard

from mindspeed_core.errors import SessionError
from mindspeed_megatron.fully_sharded.parts import rows_held
from mindspeed_megatron.unwrap import unwrap


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """Range of a parameter of the model that this rank updates.

    Attributes:
        parameter: the model's parameter; None for a rule that is used without megatron-core.
        name: of the parameter in its model chunk, ``decoder.layers.0.mlp.linear_fc1.weight``; layers are
            counted within the chunk. Empty where `mindspeed_core.put_inside` was given no model.
        start: first element of this rank, in the flattened parameter.
        stop: the element behind the last; equal to ``start`` where this rank has nothing of it.
        shape: of the parameter on this tensor-parallel rank, before data parallelism shards it.
        tensor_parallel_dim: dimension that tensor-parallel ranks cut; None where each has the whole.
        tensor_parallel_group: ranks that share the whole; None without tensor parallelism, and where
            `mindspeed_core.put_inside` was given no process groups.
        expert: it belongs to an expert of a mixture, whose groups of ranks are others.
    """

    parameter: torch.Tensor | None
    name: str
    start: int
    stop: int
    shape: torch.Size
    tensor_parallel_dim: int | None = None
    tensor_parallel_group: Any = None
    expert: bool = False


@dataclass(frozen=True)
class Holding:
    """Ranges of a flattened parameter, by the rank that updates them.

    Attributes:
        group: the ranks; None where this rank has the whole parameter.
        ranges: ``(start, stop)`` of every rank of the group, in its order; one without a group.
    """

    group: Any
    ranges: Sequence[tuple[int, int]]


class ParameterParts:
    """The parts of all parameters that one of megatron-core's optimizers updates.

    Attributes:
        every: a part for each parameter, in an order that is the same on all ranks that share them, also for
            those of which this rank has nothing.
    """

    def __init__(
        self,
        own: Mapping[torch.Tensor, ParameterPart] | None = None,
        every: Iterable[ParameterPart] = (),
        held: Callable[[torch.Tensor], Holding] | None = None,
    ) -> None:
        """Collect what `parts_of` found; without arguments, nothing is known.

        Args:
            own: parts by what the inner optimizer updates.
            every: see above.
            held: from a parameter of the model to who holds what.
        """
        self._own = dict(own or {})
        self._held = held
        self.every = tuple(every)

    def of(self, tensor: torch.Tensor) -> ParameterPart:
        """Return what an updated tensor is part of; itself, where nothing is known.

        Raises:
            TypeError: it is something else, for instance the local part of such a tensor.
        """
        if not self._own:
            return ParameterPart(None, "", 0, tensor.numel(), tensor.shape)
        if tensor not in self._own:
            raise TypeError(
                f"a tensor of {list(tensor.shape)} is none that the optimizer updates; ask with the "
                "parameter, or with what DescribedOptimizer.local_part returned for it"
            )
        return self._own[tensor]

    def held(self, tensor: torch.Tensor) -> Holding:
        """Return which rank holds which range of a parameter.

        Args:
            tensor: a parameter of the model, or what the inner optimizer updates of one.
        """
        part = self._own.get(tensor)
        if self._held is None:
            return Holding(None, ((0, tensor.numel()),))
        parameter = tensor if part is None else part.parameter
        assert parameter is not None
        return self._held(parameter)


def parts_of(
    hosting: Any, updated: Sequence[Mapping[str, Any]], model: Iterable[Any], pg: Any
) -> ParameterParts:
    """Find what the tensors of one of megatron-core's optimizers are parts of.

    Args:
        hosting: ``FP32Optimizer``, ``Float16OptimizerWithFloat16Params`` or ``DistributedOptimizer``.
        updated: groups of the inner optimizer, with what it updates.
        model: the chunks; for the names.
        pg: process groups; None for none.
    """
    describe = _Describing(model, pg)
    if not isinstance(hosting, DistributedOptimizer):
        copies = _copied(hosting)
        own = {
            tensor: describe(copies.get(tensor, tensor)) for group in updated for tensor in group["params"]
        }
        return ParameterParts(own, own.values(), _held_whole)
    if hosting.ddp_config.use_megatron_fsdp:
        own = {tensor: describe(tensor) for group in updated for tensor in group["params"]}
        return ParameterParts(own, own.values(), lambda part: _held_by_megatron_fsdp(hosting, part))
    places = _places(hosting)
    every, own = [], {}
    for parameter, place in places.items():
        start, stop = place.ranges[place.group.rank()]
        part = describe(parameter, (start, stop))
        every.append(part)
        if parameter in hosting.model_param_group_index_map:
            group, order = hosting.model_param_group_index_map[parameter]
            own[updated[group]["params"][order]] = part
    return ParameterParts(own, every, places.__getitem__)


class _Describing:
    """Makes parts of parameters, with the names that the model has for them."""

    def __init__(self, model: Iterable[Any], pg: Any) -> None:
        self._names = {
            parameter: name for chunk in model for name, parameter in unwrap(chunk).named_parameters()
        }
        self._pg = pg

    def __call__(self, parameter: Any, held: tuple[int, int] | None = None) -> ParameterPart:
        # A parameter that Megatron-FSDP has cut stands for the one that it was made from.
        original = getattr(parameter, "orig_param", parameter)
        cut = (
            getattr(original, "tensor_model_parallel", False) and getattr(original, "partition_dim", -1) >= 0
        )
        expert = not getattr(original, "allreduce", True)
        group = None if self._pg is None else self._pg.expt_tp if expert else self._pg.tp
        start, stop = held or _own_range(parameter)
        return ParameterPart(
            parameter,
            self._names.get(parameter) or self._names.get(original, ""),
            start,
            stop,
            original.shape,
            original.partition_dim if cut else None,
            group,
            expert,
        )


def _copied(hosting: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Return the model's parameter of every float32 copy."""
    groups = getattr(hosting, "float16_groups", ())
    copies = getattr(hosting, "fp32_from_float16_groups", ())
    return {
        copy: parameter
        for parameters, mains in zip(groups, copies)
        for parameter, copy in zip(parameters, mains)
        if copy is not None
    }


def _own_range(parameter: Any) -> tuple[int, int]:
    if not isinstance(parameter, DTensor):
        return 0, parameter.numel()
    if hasattr(parameter, "orig_param"):
        width = max(1, parameter.orig_param.shape[1:].numel())
        first, behind = rows_held(parameter)
        return first * width, behind * width
    holding = _held_whole(parameter)
    return holding.ranges[0] if holding.group is None else holding.ranges[holding.group.rank()]


def _held_whole(parameter: Any) -> Holding:
    """Return who holds what of a parameter that is whole, or that torch has cut by rows."""
    cut = _cut_dims(parameter) if isinstance(parameter, DTensor) else []
    if not cut:
        return Holding(None, ((0, parameter.numel()),))
    if len(cut) > 1 or parameter.placements[cut[0]] != Shard(0):
        raise SessionError(
            f"a parameter of {list(parameter.shape)} lies in {parameter.placements}; update rules know parts "
            "that are ranges of rows"
        )
    group = parameter.device_mesh.get_group(cut[0])
    rows, width = parameter.shape[0], parameter.shape[1:].numel()
    # As torch.chunk cuts: the last ranks may have fewer rows, or none.
    share = -(-rows // group.size())
    borders = [min(rank * share, rows) * width for rank in range(group.size() + 1)]
    return Holding(group, tuple(pairwise(borders)))


def _cut_dims(parameter: DTensor) -> list[int]:
    mesh = parameter.device_mesh
    return [
        dim
        for dim, kind in enumerate(parameter.placements)
        if not isinstance(kind, Replicate) and mesh.size(dim) > 1
    ]


def _places(hosting: Any) -> dict[torch.Tensor, Holding]:
    """Return who holds what of every parameter in the buffers of a distributed optimizer."""
    return {
        parameter: Holding(buffer.data_parallel_group, _Shares(parameter.numel(), begin, share, ranks))
        for buffer in hosting.buffers
        for ranks in (buffer.data_parallel_group.size(),)
        for parameter, begin, share in _in_buckets(buffer, ranks)
    }


def _in_buckets(buffer: Any, ranks: int) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Yield parameters, the place of each in its bucket, and the elements of the bucket that a rank has."""
    for parameter, (start, _, index) in buffer.param_index_map.items():
        bucket = buffer.buckets[index]
        yield parameter, start - bucket.offset, bucket.grad_data.numel() // ranks


class _Shares(Sequence[tuple[int, int]]):
    """Ranges of a parameter by rank, where ranks have equal shares of what it lies in."""

    def __init__(self, size: int, begin: int, share: int, ranks: int) -> None:
        self._size, self._begin, self._share, self._ranks = size, begin, share, ranks

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self[each] for each in range(*rank.indices(self._ranks)))
        if not -self._ranks <= rank < self._ranks:
            raise IndexError(rank)
        first = rank % self._ranks * self._share - self._begin
        start, stop = (min(max(border, 0), self._size) for border in (first, first + self._share))
        return (start, stop) if start < stop else (0, 0)


def _held_by_megatron_fsdp(hosting: Any, part: Any) -> Holding:
    whole = part.orig_param
    for chunk in hosting.model_chunks:
        found = chunk.param_and_grad_buffer
        if whole not in found.param_to_param_group:
            continue
        group = found.parameter_groups[found.param_to_param_group[whole]]
        buffer = group.main_weight_buffer
        buffer = group.model_weight_buffer if buffer is None else buffer
        if buffer is None or not hasattr(part, "megatron_fsdp_slice"):
            break
        ranks = buffer.data_parallel_group.size()
        item = buffer.item_index_map[buffer.param_idx[whole]]
        begin = item.global_data_index - buffer.bucket_index.global_data_index
        share = buffer.bucket_index.size // ranks
        return Holding(buffer.data_parallel_group, _Shares(whole.numel(), begin, share, ranks))
    return Holding(None, ((0, whole.numel()),))
