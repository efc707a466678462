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

from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.call import Call
from mindspeed_kernels.ops.contract import NPU_FLOATING, Dtype, Range, Rank, SameSize
from mindspeed_kernels.ops.operator import Make, Operator, Sample


def rms_norm_reference(
    x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False
) -> Tensor:
    """``x / sqrt(mean(x ** 2) + epsilon) * gamma`` over the last dimension.

    Args:
        x: ``[..., h]``, any floating dtype.
        gamma: ``[h]``, floating; its dtype may differ from that of ``x``.
        epsilon: added to the mean square.
        zero_centered: scale with ``1 + gamma``.

    Returns:
        ``[..., h]`` in the dtype of ``x``.
    """
    wide = _wide(x.dtype)
    values = x.to(wide)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + epsilon)
    return (normed * _scale(gamma, wide, zero_centered)).to(x.dtype)


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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scale(weight: Tensor, dtype: torch.dtype, zero_centered: bool) -> Tensor:
    return weight.to(dtype) + 1.0 if zero_centered else weight.to(dtype)


def _key(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> tuple[Any, ...]:
    return x.device, x.dtype, x.ndim, gamma.dtype, zero_centered


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
    return ""


@rms_norm.backend("torch", ("cuda",), priority=10, supports=_torch_supports)
def _torch(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), gamma, epsilon)


@rms_norm.backend(
    "npu",
    ("npu",),
    available=torch_npu_missing,
    contract=(Dtype("x", NPU_FLOATING), Rank("x", 2, 8)),
)
def _npu(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    import torch_npu

    scale = (gamma.float() + 1.0 if zero_centered else gamma).to(x.dtype)
    result: Tensor = torch_npu.npu_rms_norm(x, scale, epsilon=epsilon)[0]
    return result
