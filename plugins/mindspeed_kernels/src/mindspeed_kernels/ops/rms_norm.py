"""Root-mean-square normalization (Zhang and Sennrich, 2019), forward and backward.

The fast path keeps for backward the input and one number per row. Torch's own ``rms_norm`` decomposes on CPUs
and keeps up to four times the input in bfloat16. Everything is computed in float32 (float64 for float64) and
rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import NPU_FLOATING, Dtype, Holds, NotEmpty, Range, Rank, SameSize, Size
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

_CACHED_ELEMENTS = 1 << 19
"""Elements of the input that a CPU works on at a time."""
_WIDEST = 16384
"""The widest row that a program of the Triton kernel holds."""
_LARGE = 1 << 24
"""Elements from which on the Triton kernel is faster than torch's on an H100, its longer launch included."""


def rms_norm_reference(
    x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False
) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + epsilon) * gamma`` over the last dimension.

    Args:
        x: ``[..., h]``, any floating dtype.
        gamma: ``[h]``, floating; its dtype may differ from that of ``x``.
        epsilon: added to the mean square.
        zero_centered: scale with ``1 + gamma``.

    Returns:
        ``[..., h]`` in the dtype of ``x``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (normed * _scale(gamma, wide, zero_centered)).to(x.dtype)


class RMSNormFunction(torch.autograd.Function):
    """Keeps the input and the reciprocal root mean square of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Normalize rows ``[..., h]``; see `rms_norm_reference`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = _scale(weight, wide, zero_centered)
        rows = x.reshape(-1, x.shape[-1])
        found = _normalized_in_blocks if _blockwise(x) else _normalized
        result, rstd = found(rows, scale, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered = zero_centered
        return result.to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of input and weight; the weight's is accumulated in the wide dtype."""
        x, weight, rstd = ctx.saved_tensors
        width = x.shape[-1]
        scale = _scale(weight, rstd.dtype, ctx.zero_centered)
        rows, outer = x.reshape(-1, width), gradients[0].reshape(-1, width)
        found = _gradients_in_blocks if _blockwise(x) else _gradients
        dx, dw = found(rows, outer, scale, rstd)
        return dx.to(x.dtype).view(x.shape), dw.to(weight.dtype), None, None


class TritonRMSNormFunction(torch.autograd.Function):
    """Keeps the input and one number per row; reads and writes everything once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Normalize rows ``[..., h]``; see `rms_norm_reference`."""
        ctx.zero_centered = zero_centered
        if planned(x):
            ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1].numel(), dtype=torch.float32))
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        from mindspeed_kernels.device_kernels.rms_norm import rms_norm_forward

        result, rstd = rms_norm_forward(rows_of(x), weight.contiguous(), eps, zero_centered)
        ctx.save_for_backward(x, weight, rstd)
        return result.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients of input and weight; the weight's is accumulated in float32."""
        x, weight, rstd = ctx.saved_tensors
        if planned(x):
            return torch.empty_like(x, memory_format=torch.contiguous_format), weight.clone(), None, None
        from mindspeed_kernels.device_kernels.rms_norm import rms_norm_backward

        operands = rows_of(x), weight.contiguous(), rstd, rows_of(gradients[0])
        dx, dw = rms_norm_backward(*operands, ctx.zero_centered)
        return dx.view(x.shape), dw.to(weight.dtype), None, None


def _normalized(rows: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize and scale rows ``[r, h]`` in the wide dtype; return them and each row's factor ``[r, 1]``."""
    # Converting first is faster than operations on two dtypes at once.
    values = rows.to(scale.dtype)
    norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    rstd = torch.rsqrt(norms.square_().div_(rows.shape[-1]).add_(eps))
    # A converted copy is ours to change.
    normed = values * rstd if values.dtype == rows.dtype else values.mul_(rstd)
    return normed.mul_(scale), rstd


def _gradients(rows: Tensor, outer: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of rows ``[r, h]`` and of the scale ``[h]``, both in the wide dtype."""
    values, outer = rows.to(scale.dtype), outer.to(scale.dtype)
    # Both reductions of g * x, along rows for dx and along columns for dw, are products with a vector.
    product = outer * values
    share = torch.mv(product.t(), rstd.squeeze(-1))
    shared = torch.mv(product, scale).unsqueeze(-1).mul_(rstd.pow(3)).div_(rows.shape[-1])
    to_rows = torch.mul(outer, scale, out=product).mul_(rstd).addcmul_(values, shared, value=-1)
    return to_rows, share


def _normalized_in_blocks(rows: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `_normalized` a few rows at a time; converted rows use the same memory again and again."""
    width, step = rows.shape[1], rows_at_a_time(rows, _CACHED_ELEMENTS)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    rstd = scale.new_empty(rows.shape[0], 1)
    room = None if rows.dtype == scale.dtype else scale.new_empty(step, width)
    for block in row_blocks(rows.shape[0], step):
        part, out, factor = rows[block], result[block], rstd[block]
        values = part if room is None else room[: part.shape[0]].copy_(part)
        torch.linalg.vector_norm(values, dim=-1, keepdim=True, out=factor)
        factor.square_().div_(width).add_(eps).rsqrt_()
        normed = torch.mul(values, factor, out=out if room is None else values).mul_(scale)
        if room is not None:
            out.copy_(normed)
    return result, rstd


def _gradients_in_blocks(rows: Tensor, outer: Tensor, scale: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `_gradients` a few rows at a time; that of the rows in their own dtype."""
    width, step = rows.shape[1], rows_at_a_time(rows, _CACHED_ELEMENTS)
    to_rows, to_scale = torch.empty_like(rows, memory_format=torch.contiguous_format), torch.zeros_like(scale)
    cubes = rstd.pow(3).div_(-width)
    rooms = scale.new_empty(1 if rows.dtype == scale.dtype else 3, step, width)
    for block in row_blocks(rows.shape[0], step):
        part, gradient, factor, cube, result = (
            tensor[block] for tensor in (rows, outer, rstd, cubes, to_rows)
        )
        count, values, target = part.shape[0], part, result
        if len(rooms) > 1:
            values, gradient = rooms[1, :count].copy_(part), rooms[2, :count].copy_(gradient)
            target = gradient
        product = torch.mul(gradient, values, out=rooms[0, :count])
        to_scale.addmv_(product.t(), factor.squeeze(-1))
        shared = torch.mv(product, scale).unsqueeze(-1).mul_(cube)
        torch.mul(gradient, scale, out=target).mul_(factor).addcmul_(values, shared)
        if target is not result:
            result.copy_(target)
    return to_rows, to_scale


def _blockwise(x: Tensor) -> bool:
    # A compiler fuses the whole computation itself; fake tensors have no cache.
    return (
        kernels_for(x.device.type) == "cpu"
        and x.numel() > _CACHED_ELEMENTS
        and not torch.compiler.is_compiling()
    )


def _scale(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return weight.to(dtype) + 1.0 if zero_centered else weight.to(dtype)


def _key(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> tuple[Any, ...]:
    wide = x.shape[-1] > _WIDEST if x.ndim else False
    size = x.numel()
    return x.device, x.dtype, x.ndim, size == 0, size < _LARGE, wide, gamma.dtype, zero_centered


def _samples(make: Make) -> list[Sample]:
    return [
        Sample((make(4, 2, 64), make(64))),
        Sample((make(3, 7), make(7), 1e-5)),
        Sample((make(5, 1, 16), make(16)), {"zero_centered": True}),
        Sample((make(0, 8), make(8))),
    ]


rms_norm = Operator(
    "rms_norm",
    rms_norm_reference,
    contract=(
        Dtype("x"),
        Dtype("gamma"),
        Rank("x", 1, 8),
        Rank("gamma", 1, 1),
        SameSize("gamma", 0, "x", -1),
        Range("epsilon", 0.0, 1.0),
    ),
    key=_key,
    saved="the input and one number per row",
    samples=_samples,
)


@rms_norm.backend("rows", ("cpu", "cuda"))
def _rows(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    result: Tensor = RMSNormFunction.apply(x, gamma, epsilon, zero_centered)
    return result


def _torch_supports(call: Call) -> str:
    if call["zero_centered"] or call.dtype("gamma") != call.dtype("x"):
        # Torch's kernel takes the scale in the dtype of the input: 1 + gamma would be rounded before use.
        return "it takes gamma in the dtype of x only, and rounds 1 + gamma"
    if kernels_for("cpu") != "cpu":
        return "in a dry run it would be taken apart; the other kernel keeps as much"
    return ""


def _few_elements(call: Call) -> tuple[Any, Any] | None:
    shape = call["x"].shape
    return None if shape is None or math.prod(shape) < _LARGE else (math.prod(shape), _LARGE - 1)


@rms_norm.backend(
    "torch",
    ("cuda",),
    priority=PRIORITY + 10,
    supports=_torch_supports,
    contract=(Holds("x", f"must have fewer than {_LARGE} elements", _few_elements),),
)
def _torch(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, epsilon)


@rms_norm.backend(
    "triton",
    DEVICES,
    priority=PRIORITY,
    available=triton_missing,
    supports=only_floating("x", "gamma"),
    contract=(Size("x", -1, 1, _WIDEST),),
)
def _triton(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    if torch.compiler.is_compiling():
        return rms_norm_reference(x, gamma, epsilon, zero_centered)
    result: Tensor = TritonRMSNormFunction.apply(x, gamma, epsilon, zero_centered)
    return result


@rms_norm.backend(
    "npu",
    ("npu",),
    available=torch_npu_missing,
    contract=(Dtype("x", NPU_FLOATING), Rank("x", 2, 8), NotEmpty("x")),
)
def _npu(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    if too_narrow(x):
        return rms_norm_reference(x, gamma, epsilon, zero_centered)
    import torch_npu

    scale = (gamma.float() + 1.0 if zero_centered else gamma).to(x.dtype)
    result: Tensor = torch_npu.npu_rms_norm(x, scale, epsilon=epsilon)[0]
    return result


def too_narrow(x: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether the kernel of Ascend 310P cannot differentiate rows ``[..., h]``, given in a dtype."""
    return ascend_generation() == "310P" and x.shape[-1] * (dtype or x.dtype).itemsize < 32


add_compiled(rms_norm)
