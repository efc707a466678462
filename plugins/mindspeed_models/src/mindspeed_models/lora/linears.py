"""A parallel linear and the low-rank update beside it: ``y = W x + (alpha / r) · B (A x)``.

The class derives from whatever linear stands at its place, so that it composes with every other change of
linears. Letters of shapes: ``s`` sequence, ``b`` batch, ``k`` inputs, ``n`` outputs, ``r`` rank of the
update, ``t`` tensor-parallel ranks.

Beside a column-parallel linear ``A`` ``[r, k]`` is on every rank and ``B`` ``[n / t, r]`` is cut like the
weight; beside a row-parallel one ``A`` ``[r, k / t]`` is cut and ``B`` ``[n, r]`` is on every rank. What
ranks exchange for the update has ``r`` columns.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn
from torch.nn import functional as F

from mindspeed_core.errors import UserError
from mindspeed_megatron.sharded_modules import sharded_tensors
from mindspeed_models.lora.options import A, AdapterOptions, B
from mindspeed_models.lora.put_off import Leave, product_put_off


class LowRankUpdate:
    """The part of a parallel linear that is an adapter.

    Attributes:
        lora: its options.
        lora_A: ``[r, k]`` beside a column, ``[r, k / t]`` beside a row.
        lora_B: ``[n / t, r]`` beside a column, ``[n, r]`` beside a row; zero at first.
    """

    lora: AdapterOptions
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    opaque = True
    """See `mindspeed_megatron.linear_layout`: more than the product with its weight."""

    def add_adapter(self: Any, options: AdapterOptions) -> None:
        """Create the parameters of the adapter.

        Args:
            options: of it.

        Raises:
            UserError: the linear takes whole rows, or belongs to routed experts.
        """
        if self.is_expert:
            raise UserError(
                f"{type(self).__name__}: adapters of routed experts do not exist; target attention"
            )
        self.lora = options
        column = isinstance(self, ColumnParallelLinear)
        if not column and not self.input_is_parallel:
            raise UserError(
                f"{type(self).__name__} takes whole rows; an adapter needs this rank's part of them"
            )
        ranks = self.tp_group.size()
        inputs, outputs = self.input_size, self.output_size
        like: dict[str, Any] = {"dtype": self.config.params_dtype, "device": _device(self)}
        whole = first_values(options, inputs)
        # Gradients of what saw this rank's part of the sequence alone are summed over tensor-parallel ranks.
        if column:
            a, b = whole, torch.zeros(outputs // ranks, options.rank)
        else:
            a, b = whole.chunk(ranks, dim=1)[self.tp_group.rank()], torch.zeros(outputs, options.rank)
        self.lora_A = nn.Parameter(a.to(**like).contiguous())
        self.lora_B = nn.Parameter(b.to(**like))
        for parameter, cut, dim in ((self.lora_A, not column, 1), (self.lora_B, column, 0)):
            set_tensor_model_parallel_attributes(parameter, cut, dim if cut else -1, 1)
            setattr(parameter, "sequence_parallel", bool(self.sequence_parallel) and not cut)  # noqa: B010
            setattr(parameter, "allreduce", True)  # noqa: B010

    def update(self: Any, input_: Tensor) -> Tensor:
        """Return the update of this rank's output.

        Args:
            input_: ``[s, b, k]``, or this rank's rows of it, beside a column; ``[s, b, k / t]`` beside a row.
        """
        options: AdapterOptions = self.lora
        column = isinstance(self, ColumnParallelLinear)
        if options.dropout and self.training:
            with self._own_masks(column):
                input_ = F.dropout(input_, options.dropout)
        low = self._product(input_.to(self.lora_A.dtype), self.lora_A) * options.scale
        if self.tp_group.size() > 1:
            low = self._exchanged(low, column)
        return self._product(low, self.lora_B)

    def put_off_weight_gradients(self: Any, leave: Leave) -> None:
        """Hand computations of the adapter's gradients to a pipeline schedule, as those of the weight.

        Args:
            leave: takes each computation and its operands, and calls it with them, later or at once.
        """
        self._lora_leave = leave
        super().put_off_weight_gradients(leave)  # type: ignore[misc]

    def _product(self: Any, input_: Tensor, weight: Tensor) -> Tensor:
        leave = getattr(self, "_lora_leave", None)
        return F.linear(input_, weight) if leave is None else product_put_off(input_, weight, leave)

    def _exchanged(self: Any, low: Tensor, column: bool) -> Tensor:
        group = self.tp_group
        if column:
            found = (
                gather_from_sequence_parallel_region(low, group=group)
                if self.sequence_parallel
                else copy_to_tensor_model_parallel_region(low, group=group)
            )
        else:
            found = (
                reduce_scatter_to_sequence_parallel_region(low, group=group)
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region(low, group=group)
            )
        return found

    def _own_masks(self: Any, column: bool) -> AbstractContextManager[None]:
        """Draw masks that differ between tensor-parallel ranks where their inputs are different parts."""
        if self.tp_group.size() == 1 or (column and not self.sequence_parallel):
            return nullcontext()
        forked: AbstractContextManager[None] = get_cuda_rng_tracker().fork()
        return forked

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Describe the linear, and its adapter in the same parts."""
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        column = isinstance(self, ColumnParallelLinear)
        own = sharded_tensors(
            {A: self.lora_A, B: self.lora_B},
            prefix,
            {B: 0} if column else {A: 1},
            sharded_offsets,
            tp_group=self.tp_group,
            metadata=metadata,
        )
        if self.lora.gated:
            # Gate and up projection are two parts of the whole, whatever the number of ranks.
            alone = bool((metadata or {}).get("singleton_local_shards", False))
            own[prefix + B] = apply_swiglu_sharded_factory(own[prefix + B], sharded_offsets, alone)
        return {**found, **own}


class _ColumnUpdate(LowRankUpdate):
    def forward(
        self: Any, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Multiply ``[s, b, k]``, or this rank's rows of it; return ``[s, b, n / t]`` and an unused bias."""
        output, bias = super().forward(input_, weight, runtime_gather_output=False)  # type: ignore[misc]
        output = output + self.update(input_).to(output.dtype)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            output = gather_from_tensor_model_parallel_region(output, group=self.tp_group)
        return output, bias


class _RowUpdate(LowRankUpdate):
    def forward(self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply ``[s, b, k / t]``; return ``[s, b, n]``, or this rank's rows, and an unused bias."""
        output, bias = super().forward(input_)  # type: ignore[misc]
        return output + self.update(input_).to(output.dtype), bias


def first_values(options: AdapterOptions, inputs: int) -> Tensor:
    """Draw ``A`` ``[r, k]`` of one linear, uniform within ``±1 / √k``; the same in every layout."""
    digest = hashlib.sha256(options.seed.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    drawn = torch.rand(options.rank, inputs, generator=generator, dtype=torch.float32)
    return (drawn * 2.0 - 1.0) / inputs**0.5


def takes_adapters(module: Any) -> bool:
    """Return whether a class of linears can be adapted."""
    return isinstance(module, type) and issubclass(module, (ColumnParallelLinear, RowParallelLinear))


@cache
def adapted(base: Any) -> Any:
    """Return the subclass of a parallel linear that has an adapter, and takes its options as ``lora``."""
    update = _ColumnUpdate if issubclass(base, ColumnParallelLinear) else _RowUpdate

    class Adapted(update, base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, lora: AdapterOptions, **named: Any) -> None:
            super().__init__(*args, **named)
            self.add_adapter(lora)

    Adapted.__name__ = Adapted.__qualname__ = f"Lora{base.__name__}"
    return Adapted


def adapt_instance(linear: Any, options: AdapterOptions) -> None:
    """Put an adapter beside a linear that is built already."""
    kind: Any = type(linear)
    linear.__class__ = adapted(kind)
    linear.add_adapter(options)


def _device(linear: Any) -> torch.device:
    weight = getattr(linear, "weight", None)
    if weight is not None:
        found: torch.device = weight.device
        return found
    if linear.config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
