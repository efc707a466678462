"""Root-mean-square normalization (Zhang and Sennrich, 2019), forward and backward.

The fast path keeps for backward the input and one number per row. Torch's own ``rms_norm`` decomposes on CPUs
and keeps up to four times the input in bfloat16. Everything is computed in float32 (float64 for float64) and
rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.ops.operator import Operator


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last dimension.

    Args:
        x: ``[..., h]``, any floating dtype.
        weight: ``[h]``, floating; its dtype may differ from that of ``x``.
        eps: added to the mean square.
        zero_centered: scale with ``1 + weight``.

    Returns:
        ``[..., h]`` in the dtype of ``x``.
    """
    wide = _wide(x.dtype)
    scale = weight.to(wide) + 1.0 if zero_centered else weight.to(wide)
    values = x.to(wide)
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * scale).to(x.dtype)


class RMSNormFunction(torch.autograd.Function):
    """Keeps the input and the reciprocal root mean square of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Normalize rows ``[..., h]``; see `rms_norm_reference`."""
        wide = _wide(x.dtype)
        # The norm accumulates in the wide dtype without a wide copy of the input.
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        rstd = torch.rsqrt(norms.square_().div_(x.shape[-1]).add_(eps))
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered = zero_centered
        return (x * rstd).mul_(_scale(weight, wide, zero_centered)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Gradients of input and weight; the weight's is accumulated in the wide dtype."""
        x, weight, rstd = ctx.saved_tensors
        wide = rstd.dtype
        width = x.shape[-1]
        scale = _scale(weight, wide, ctx.zero_centered)
        rows = x.reshape(-1, width)
        rstd = rstd.reshape(-1)
        gradient = gradients[0].reshape(-1, width)
        # Both reductions of g * x, along rows for dx and along columns for dw, are products with a vector.
        product = gradient.to(wide) * rows
        dx = dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.mv(product.t(), rstd).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            shared = torch.mv(product, scale).mul_(rstd.pow(3)).div_(width)
            dx = torch.mul(gradient, scale, out=product) if gradient.dtype == wide else gradient * scale
            dx.mul_(rstd.unsqueeze(-1)).addcmul_(rows.to(wide), shared.unsqueeze(-1), value=-1)
            dx = dx.to(x.dtype).reshape(x.shape)
        return dx, dw, None, None


def _cpu(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    result: Tensor = RMSNormFunction.apply(x, weight, eps, zero_centered)
    return result


def _cuda(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    if zero_centered or weight.dtype != x.dtype:
        # Torch's kernel takes the scale in the dtype of the input: 1 + weight would be rounded before use.
        return _cpu(x, weight, eps, zero_centered)
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _npu(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    import torch_npu

    scale = (weight.float() + 1.0 if zero_centered else weight).to(x.dtype)
    result: Tensor = torch_npu.npu_rms_norm(x, scale, epsilon=eps)[0]
    return result


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scale(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return weight.to(dtype) + 1.0 if zero_centered else weight.to(dtype)


rms_norm = Operator("rms_norm", rms_norm_reference, {"cpu": _cpu, "cuda": _cuda, "npu": _npu})
