"""SwiGLU (Shazeer, 2020): the gated activation ``silu(a) * b`` of the two halves of a tensor.

The fast path keeps only its input for backward and computes the activation again there, where the composition
of torch operations keeps half a tensor more. Everything is computed in float32 (float64 for float64) and
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mindspeed_kernels.contract import NPU_FLOATING, ContractError, Dtype, NotEmpty, Rank
from mindspeed_kernels.ops.availability import ascend_generation, torch_npu_missing
from mindspeed_kernels.ops.cached_rows import row_blocks, rows_at_a_time
from mindspeed_kernels.ops.compiled import add_compiled
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.triton_kernels import (
    DEVICES,
    PRIORITY,
    only_floating,
    planned,
    rows_of,
    triton_missing,
)
from mindspeed_megatron.planned_kernels import kernels_for

_CACHED_ELEMENTS = 1 << 18
"""Elements of the input that a CPU works on at a time."""


def swiglu_reference(x: Tensor, dim: int = -1) -> Tensor:
    """Compute ``silu(a) * b`` with ``[a | b] = x`` along one dimension.

    Args:
        x: ``[..., 2 f]``, any floating dtype.
        dim: the dimension that holds gate and value.

    Returns:
        ``[..., f]`` in the dtype of ``x``.

    Raises:
        ContractError: the dimension is odd.
    """
    _check(x, dim)
    wide = torch.promote_types(x.dtype, torch.float32)
    # Cut first: a compiler then rounds each half's gradient before it joins them.
    gate, value = (half.to(wide) for half in x.chunk(2, dim=dim))
    return (gate * torch.sigmoid(gate) * value).to(x.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """Keeps the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Activate ``[..., 2 f]``; see `swiglu_reference`."""
        ctx.save_for_backward(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        if not _blockwise(x):
            gate, value = x.chunk(2, dim=-1)
            return (F.silu(gate.to(wide)) * value).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        result = x.new_empty(rows.shape[0], x.shape[-1] // 2)
        room = _room(rows, wide)
        for block in _blocks(rows):
            # Converting first is faster than operations on two dtypes at once.
            values = rows[block] if room is None else room[0, : rows[block].shape[0]].copy_(rows[block])
            gate, value = values.chunk(2, dim=-1)
            part = result[block] if room is None else room[1, : gate.shape[0], : gate.shape[1]]
            torch.ops.aten.silu.out(gate, out=part)
            part.mul_(value)
            if room is not None:
                result[block] = part
        return result.view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the input ``[..., 2 f]``."""
        (x,) = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        if not _blockwise(x):
            gate, value = x.to(wide).chunk(2, dim=-1)
            gradient = gradients[0].to(wide)
            to_gate = torch.ops.aten.silu_backward(gradient * value, gate)
            return torch.cat((to_gate, F.silu(gate) * gradient), dim=-1).to(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        outer = gradients[0].reshape(-1, x.shape[-1] // 2)
        result = torch.empty_like(rows, memory_format=torch.contiguous_format)
        room = _room(rows, wide, 3)
        for block in _blocks(rows):
            values, gradient, part = rows[block], outer[block], result[block]
            if room is None:
                _gradient_into(part, values, gradient)
                continue
            count, half = gradient.shape
            wider = room[2, :count, :half].copy_(gradient)
            _gradient_into(room[1, :count], room[0, :count].copy_(values), wider)
            part.copy_(room[1, :count])
        return result.view(x.shape)


class TritonSwiGLUFunction(torch.autograd.Function):
    """Keeps the input; reads and writes everything once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Activate ``[..., 2 f]``; see `swiglu_reference`."""
        ctx.save_for_backward(x)
        if planned(x):
            return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        from mindspeed_kernels.device_kernels.swiglu import swiglu_forward

        return swiglu_forward(rows_of(x)).view(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient of the input ``[..., 2 f]``."""
        (x,) = ctx.saved_tensors
        if planned(x):
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        from mindspeed_kernels.device_kernels.swiglu import swiglu_backward

        return swiglu_backward(rows_of(x), rows_of(gradients[0])).view(x.shape)


def _gradient_into(result: Tensor, values: Tensor, gradient: Tensor) -> None:
    """Write the gradient of ``values`` ``[r, 2 f]`` without further memory; all of one dtype."""
    gate, value = values.chunk(2, dim=-1)
    to_gate, to_value = result.chunk(2, dim=-1)
    torch.mul(gradient, value, out=to_gate)
    torch.ops.aten.silu_backward.grad_input(to_gate, gate, grad_input=to_gate)
    torch.ops.aten.silu.out(gate, out=to_value)
    to_value.mul_(gradient)


def _blockwise(x: Tensor) -> bool:
    # A compiler fuses the whole computation itself.
    return kernels_for(x.device.type) == "cpu" and x.shape[-1] > 0 and not torch.compiler.is_compiling()


def _room(rows: Tensor, wide: torch.dtype, copies: int = 2) -> Tensor | None:
    """Allocate memory that all converted blocks use; None where nothing has to be converted."""
    if rows.dtype == wide:
        return None
    return rows.new_empty(copies, rows_at_a_time(rows, _CACHED_ELEMENTS), rows.shape[1], dtype=wide)


def _blocks(rows: Tensor) -> Iterable[slice]:
    return row_blocks(rows.shape[0], rows_at_a_time(rows, _CACHED_ELEMENTS))


def _check(x: Tensor, dim: int) -> None:
    # An odd width of 3 would otherwise broadcast to a wrong result.
    if x.shape[dim] % 2:
        raise ContractError(
            f"swiglu: dimension {dim} of x holds gate and value, must be even, got {x.shape[dim]}; "
            f"nearest supported: {x.shape[dim] + 1}"
        )


def _key(x: Tensor, dim: int = -1) -> tuple[Any, ...]:
    return x.device, x.dtype, x.ndim, x.numel() == 0


def _samples(make: Make) -> list[Sample]:
    return [Sample((make(4, 2, 64),)), Sample((make(6, 10), 0)), Sample((make(0, 8),))]


swiglu = Operator(
    "swiglu",
    swiglu_reference,
    contract=(Dtype("x"), Rank("x", 1, 8)),
    key=_key,
    saved="the input",
    samples=_samples,
)


@swiglu.backend("fused", ("cpu", "cuda"))
def _fused(x: Tensor, dim: int = -1) -> Tensor:
    return swiglu_along_last(SwiGLUFunction.apply, x, dim)


@swiglu.backend("triton", DEVICES, priority=PRIORITY, available=triton_missing, supports=only_floating("x"))
def _triton(x: Tensor, dim: int = -1) -> Tensor:
    if torch.compiler.is_compiling():
        return swiglu_reference(x, dim)
    return swiglu_along_last(TritonSwiGLUFunction.apply, x, dim)


def swiglu_along_last(activate: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Activate along any dimension with a function of the last one."""
    _check(x, dim)
    if dim in (-1, x.ndim - 1):
        return activate(x)
    return activate(x.movedim(dim, -1)).movedim(-1, dim)


@swiglu.backend(
    "npu", ("npu",), available=torch_npu_missing, contract=(Dtype("x", NPU_FLOATING), NotEmpty("x"))
)
def _npu(x: Tensor, dim: int = -1) -> Tensor:
    import torch_npu

    _check(x, dim)
    if ascend_generation() == "310P" and math.prod(x.shape[dim:]) // 2 * x.element_size() % 64:
        # The kernel of this generation reads halves in steps of 64 bytes.
        return swiglu_reference(x, dim)
    result: Tensor = torch_npu.npu_swiglu(x, dim=dim)
    return result


add_compiled(swiglu)
