"""Linears whose weight is cut in both dimensions.

They are the planned linears with other groups: megatron-core's constructor makes a weight ``[n / x, k / y]``
when it is told of a linear of ``k / y`` inputs on the ranks of the x group.
"""

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

from mindspeed_megatron.linear_layout import LinearLayout
from mindspeed_tp.grid.gradients import learned_in_parts
from mindspeed_tp.grid.place import X, Y, here
from mindspeed_tp.linear_function import Communication
from mindspeed_tp.linears import PlannedColumn, PlannedRow
from mindspeed_tp.options import GRID
from mindspeed_tp.rows import Rows

Fragment = tuple[int, int, int]
"""Axis, this rank's part of it, and the number of parts."""


class _Linear2D:
    """Shared parts of both linear layers: initial values, attributes and checkpoints of a 2D shard."""

    weight: Any
    bias: Any
    axes: tuple[int, int]
    """Axis of the weight that x cuts, and axis that y cuts."""
    stride = 1

    def _initialize(self, config: Any, init_method: Any, size: tuple[int, int]) -> None:
        """Set the weight: on CPU to this rank's part of the weight that one rank would draw."""
        self.config = config
        if config.perform_initialization and config.use_cpu_initialization:
            whole = torch.empty(size, dtype=torch.float32)
            init_method(whole)
            with torch.no_grad():
                self.weight.copy_(self.part_of(whole))
        elif config.perform_initialization:
            _initialize_affine_weight_gpu(
                self.weight, init_method, partition_dim=self.axes[0], stride=self.stride
            )
        for name in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(self.weight, name):
                delattr(self.weight, name)
        set_tensor_model_parallel_attributes(self.weight, True, self.axes[0], self.stride)
        if self.bias is not None and config.perform_initialization:
            with torch.no_grad():
                self.bias.zero_()

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a weight ``[n, k]``."""
        (x, y), (i, j) = here().size, here().rank
        along_x, along_y = self.axes
        halves = whole.chunk(self.stride, along_x)
        shard = torch.cat([half.chunk(x, along_x)[i] for half in halves], along_x)
        return shard.chunk(y, along_y)[j]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe the tensors as parts of those of one rank."""
        place = here()
        (x, y), (i, j) = place.size, place.rank
        copy_of = metadata["dp_cp_group"].rank()
        extra = f"{prefix}_extra_state"
        found = {extra: make_sharded_object_for_checkpoint(None, extra, sharded_offsets)}
        along_x, along_y = (self.axes[0], i, x), (self.axes[1], j, y)
        found[f"{prefix}weight"] = _described(
            f"{prefix}weight", self.weight, self.stride, along_x, (along_y,), sharded_offsets, (0, 0, copy_of)
        )
        if self.bias is not None:
            # A bias lies along the rows of the weight; the ranks of the other group hold copies.
            axis_of_x = self.axes[0] == 0
            along, replica = ((0, i, x), j) if axis_of_x else ((0, j, y), i)
            found[f"{prefix}bias"] = _described(
                f"{prefix}bias", self.bias, self.stride, along, (), sharded_offsets, (0, replica, copy_of)
            )
        return found


def _described(
    key: str,
    tensor: Tensor,
    stride: int,
    along: Fragment,
    others: tuple[Fragment, ...],
    offsets: tuple[Any, ...],
    replica: tuple[int, int, int],
) -> Any:
    """Describe a tensor, or ``stride`` tensors one behind the other that are cut alike."""
    before = len(offsets)
    axis, part, parts = along
    rest = [(before + other, place, count) for other, place, count in others]

    def built(name: str, data: Tensor, number: int, replica_id: Any) -> ShardedTensor:
        shard = (before + axis, number * parts + part, stride * parts)
        return ShardedTensor.from_rank_offsets(
            name, data, *offsets, shard, *rest, replica_id=replica_id, prepend_axis_num=before
        )

    if stride == 1:
        return built(key, tensor, 0, replica)

    @torch.no_grad()
    def build(name: str, data: Tensor, replica_id: Any, flattened_range: Any) -> list[ShardedTensor]:
        return [built(name, half, number, replica_id) for number, half in enumerate(data.chunk(stride, axis))]

    def merge(halves: Any) -> Tensor:
        return torch.cat(list(halves), axis)

    return ShardedTensorFactory(key, tensor, build, merge, replica)


class Column2D(_Linear2D, PlannedColumn):
    """Column linear: gathers rows over x, sums its products over y and leaves each rank rows of the sum.

    The weight is ``[n / x, k / y]``, the result ``[s / y, b, n / x]``.
    """

    axes = (0, 1)
    linear_layout = LinearLayout(GRID, "[s / x, b, k / y]", "[s / y, b, n / x]")

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, **named: Any
    ) -> None:
        """Build the linear; arguments are those of ``ColumnParallelLinear``."""
        place, bare = here(), copy.copy(config)
        bare.perform_initialization = False
        named["tp_group"] = place.x
        # megatron-core 0.15 does not say that a gated width is two weights behind each other.
        gated = config.gated_linear_unit and named.get("tp_comm_buffer_name") == "fc1"
        self.stride = named["stride"] = 2 if gated else named.get("stride", 1)
        super().__init__(
            input_size // place.y.size(), output_size, config=bare, init_method=init_method, **named
        )
        self._initialize(config, init_method, (output_size, input_size))
        if self.bias is not None:
            learned_in_parts(self.bias, Y, counted=place.y.rank() == 0)

    def communication(self) -> Communication:
        """Return the groups of a call."""
        place = here()
        return Communication(gather=Rows(place.x), reduce=Rows(place.y), scatter=True)


class Row2D(_Linear2D, PlannedRow):
    """Row linear: gathers rows over y, sums its products over x and leaves each rank rows of the sum.

    The weight is ``[n / y, k / x]``, the result ``[s / x, b, n / y]``.
    """

    axes = (1, 0)
    linear_layout = LinearLayout(GRID, "[s / y, b, k / x]", "[s / x, b, n / y]")

    def __init__(
        self, input_size: int, output_size: int, *, config: Any, init_method: Any, **named: Any
    ) -> None:
        """Build the linear; arguments are those of ``RowParallelLinear``."""
        place, bare = here(), copy.copy(config)
        bare.perform_initialization = False
        named["tp_group"] = place.x
        super().__init__(
            input_size, output_size // place.y.size(), config=bare, init_method=init_method, **named
        )
        self._initialize(config, init_method, (output_size, input_size))
        if self.bias is not None:
            learned_in_parts(self.bias, X, counted=place.x.rank() == 0)

    def communication(self) -> Communication:
        """Return the groups of a call."""
        place = here()
        return Communication(gather=Rows(place.y), reduce=Rows(place.x), scatter=True)
