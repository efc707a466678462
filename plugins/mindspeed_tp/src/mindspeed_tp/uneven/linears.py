"""Planned linears whose weight is cut into parts of different sizes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
from torch import Tensor

from mindspeed_core.session import current
from mindspeed_megatron.linear_layout import LinearLayout
from mindspeed_tp.linear_function import Communication
from mindspeed_tp.linears import PlannedColumn, PlannedRow
from mindspeed_tp.options import UNEVEN
from mindspeed_tp.rows import Rows
from mindspeed_tp.uneven.cut import Cut

ALONE, TOGETHER = "tp.alone", "tp.together"
"""Names of process groups: of this rank alone; of the tensor-parallel ranks."""


class _UnevenLinear:
    """Shared parts of both linear layers: initial values, attributes and checkpoints of an uneven shard."""

    weight: Any
    bias: Any
    cut: Cut
    tp_group: Any
    axis: int
    """Of the weight, the one that is cut."""

    def _settle(self, config: Any, init_method: Any, whole: tuple[int, int]) -> None:
        """Set groups and the weight, on CPU to this rank's part of the weight that one rank would draw."""
        self.config = config
        self.tp_group = current().groups[TOGETHER]
        self.sequence_parallel = config.sequence_parallel
        if config.perform_initialization and config.use_cpu_initialization:
            drawn = torch.empty(whole, dtype=torch.float32)
            init_method(drawn)
            with torch.no_grad():
                self.weight.copy_(self.part_of(drawn))
        elif config.perform_initialization:
            _initialize_affine_weight_gpu(
                self.weight, init_method, partition_dim=self.axis, stride=self.cut.halves
            )
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(self.weight, name):
                delattr(self.weight, name)
        set_tensor_model_parallel_attributes(self.weight, True, self.axis, self.cut.halves)
        if self.bias is not None and config.perform_initialization:
            with torch.no_grad():
                self.bias.zero_()

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight ``[n, k]``."""
        parts, rank = self.cut.parts, self.tp_group.rank()
        halves = whole.chunk(self.cut.halves, self.axis)
        start, size = parts.start(rank), parts.sizes[rank]
        return torch.cat([half.narrow(self.axis, start, size) for half in halves], self.axis)

    @property
    def rows(self) -> Rows:
        """Return the group and the parts of the sequence."""
        return Rows(self.tp_group, self.cut.sequence)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe the tensors as parts of those of one rank."""
        copy_of, rank = metadata["dp_cp_group"].rank(), self.tp_group.rank()
        extra = f"{prefix}_extra_state"
        found: dict[str, Any] = {extra: make_sharded_object_for_checkpoint(None, extra, sharded_offsets)}
        found[f"{prefix}weight"] = self._described(
            f"{prefix}weight", self.weight, sharded_offsets, (0, 0, copy_of)
        )
        if self.bias is not None and self.axis == 0:
            found[f"{prefix}bias"] = self._described(
                f"{prefix}bias", self.bias, sharded_offsets, (0, 0, copy_of)
            )
        elif self.bias is not None:
            found[f"{prefix}bias"] = ShardedTensor.from_rank_offsets(
                f"{prefix}bias",
                self.bias,
                *sharded_offsets,
                replica_id=(0, rank, copy_of),
                prepend_axis_num=len(sharded_offsets),
            )
        return found

    def _described(self, key: str, tensor: Tensor, offsets: tuple[Any, ...], replica: Any) -> Any:
        parts, rank, axis = self.cut.parts, self.tp_group.rank(), self.axis
        before, halves = len(offsets), self.cut.halves

        def built(name: str, data: Tensor, number: int, replica_id: Any) -> ShardedTensor:
            shape, begins = list(data.shape), [0] * data.dim()
            shape[axis] = halves * parts.total
            begins[axis] = number * parts.total + parts.start(rank)
            # Fragments of different sizes are no grid, and outside of a grid there are no axes in front.
            seen = data.view(*(1 for _ in offsets), *data.shape)
            return ShardedTensor(
                key=name,
                data=seen,
                dtype=data.dtype,
                local_shape=tuple(seen.shape),
                global_shape=(*(size for _, _, size in offsets), *shape),
                global_offset=(*(place for _, place, _ in offsets), *begins),
                axis_fragmentations=None,
                replica_id=replica_id,
            )

        @torch.no_grad()
        def build(name: str, data: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
            return [built(name, half, n, replica_id) for n, half in enumerate(data.chunk(halves, axis))]

        def merge(loaded: Any) -> Tensor:
            return torch.cat([half.view(half.shape[before:]) for half in loaded], axis)

        return ShardedTensorFactory(key, tensor, build, merge, replica)


def _alone(config: Any) -> Any:
    """Return a configuration with which megatron-core makes a tensor of this rank, and no values for it."""
    bare = copy.copy(config)
    bare.perform_initialization = bare.sequence_parallel = False
    return bare


class UnevenColumn(_UnevenLinear, PlannedColumn):
    """Column linear whose output is distributed unevenly."""

    axis = 0
    linear_layout = LinearLayout(UNEVEN, "[s or an uneven part of it, b, k]", "[s, b, an uneven part of n]")

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, cut: Cut, **named: Any
    ) -> None:
        """Build the linear; the cut says how large its output is, on all ranks and on this one."""
        self.cut = cut
        own = cut.parts.sizes[current().groups[TOGETHER].rank()] * cut.halves
        named |= {"tp_group": current().groups[ALONE], "stride": cut.halves}
        super().__init__(input_size, own, config=_alone(config), init_method=init_method, **named)
        self._settle(config, init_method, (cut.parts.total * cut.halves, input_size))

    def communication(self) -> Communication:
        """Return the groups of a call."""
        if self.sequence_parallel:
            return Communication(gather=self.rows)
        return Communication(input_gradient=self.tp_group if self.tp_group.size() > 1 else None)


class UnevenRow(_UnevenLinear, PlannedRow):
    """Row linear whose input is distributed unevenly."""

    axis = 1
    linear_layout = LinearLayout(UNEVEN, "[s, b, an uneven part of k]", "[s or an uneven part of it, b, n]")

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, cut: Cut, **named: Any
    ) -> None:
        """Build the linear; the cut says how large its input is, on all ranks and on this one."""
        self.cut = cut
        own = cut.parts.sizes[current().groups[TOGETHER].rank()]
        named |= {"tp_group": current().groups[ALONE]}
        super().__init__(own, output_size, config=_alone(config), init_method=init_method, **named)
        self._settle(config, init_method, (output_size, cut.parts.total))
        if self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel

    def communication(self) -> Communication:
        """Return the groups of a call, its sum over ranks included."""
        if self.tp_group.size() == 1:
            return Communication()
        return Communication(reduce=self.rows, scatter=self.sequence_parallel)
