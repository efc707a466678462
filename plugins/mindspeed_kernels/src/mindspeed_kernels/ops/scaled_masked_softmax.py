"""Softmax of scaled scores with hidden positions, which keeps its result only.

The composition of torch operations keeps a float32 copy besides. Rows of which everything is hidden are zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.contract import NPU_FLOATING, ContractError, Divisible, Dtype, Rank, Size
from mindspeed_kernels.ops.operator import Make, Operator, Sample


def scaled_masked_softmax_reference(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    """``softmax(scale * x)`` over the last dimension, where ``mask`` does not hide.

    Args:
        x: scores ``[b, n, sq, sk]``, floating.
        mask: ``[b | 1, n | 1, sq, sk]`` bool, True hides; None hides nothing.
        scale: factor of the scores.
        fixed_triu_mask: hide the strict upper triangle instead; ``mask`` must be None.

    Returns:
        ``[b, n, sq, sk]`` in the dtype of ``x``.

    Raises:
        ContractError: both masks, or a triangle of scores that are not square.
    """
    hidden = _hidden(x, mask, fixed_triu_mask)
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = x.to(wide) * scale
    if hidden is None:
        return torch.softmax(scores, dim=-1).to(x.dtype)
    scores = scores.masked_fill(hidden, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights.masked_fill(hidden.all(-1, keepdim=True), 0.0).to(x.dtype)


def _hidden(x: Tensor, mask: Tensor | None, triangle: bool) -> Tensor | None:
    if not triangle:
        return None if mask is None else mask.bool()
    if mask is not None:
        raise ContractError(
            "scaled_masked_softmax[any]: mask must be None with fixed_triu_mask, got a tensor; nearest "
            "supported: fixed_triu_mask=False"
        )
    sq, sk = x.shape[-2:]
    if sq != sk:
        raise ContractError(
            f"scaled_masked_softmax[any]: x must be square with fixed_triu_mask, got {sq} x {sk}; nearest "
            "supported: a mask"
        )
    return torch.ones(sq, sk, dtype=torch.bool, device=x.device).triu_(1)[None, None]


class ScaledMaskedSoftmax(torch.autograd.Function):
    """Keeps the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
        """Softmax; see `scaled_masked_softmax_reference`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = x.to(wide) * scale
        if hidden is not None:
            scores.masked_fill_(hidden, torch.finfo(wide).min)
        result = torch.softmax(scores, dim=-1, dtype=wide)
        if hidden is not None:
            # The smallest number instead of -inf makes rows without anything uniform instead of NaN.
            result = result.masked_fill(hidden.all(-1, keepdim=True), 0.0)
        result = result.to(x.dtype)
        ctx.save_for_backward(result)
        ctx.scale = scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """``scale * y * (g - sum(g * y))``."""
        (result,) = ctx.saved_tensors
        wide = torch.promote_types(result.dtype, torch.float32)
        product = gradients[0].to(wide) * result
        shared = product.sum(-1, keepdim=True)
        return (
            product.addcmul_(result.to(wide), shared, value=-1).mul_(ctx.scale).to(result.dtype),
            None,
            None,
        )


def _samples(make: Make) -> list[Sample]:
    x = make(1, 2, 3, 5)
    mask = torch.zeros(1, 1, 3, 5, dtype=torch.bool, device=x.device)
    mask[..., 1, :] = True
    mask[..., 2, 2:] = True
    square = make(1, 2, 32, 32)
    return [
        Sample((x,), {"scale": 0.5}),
        Sample((x, mask, 2.0)),
        Sample((square,), {"fixed_triu_mask": True}),
    ]


scaled_masked_softmax = Operator(
    "scaled_masked_softmax",
    scaled_masked_softmax_reference,
    contract=(Dtype("x"), Rank("x", 4, 4), Dtype("mask", (torch.bool, torch.uint8)), Rank("mask", 4, 4)),
    saved="the result",
    samples=_samples,
)


@scaled_masked_softmax.backend("fused", ("cpu", "cuda"))
def _fused(
    x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False
) -> Tensor:
    result: Tensor = ScaledMaskedSoftmax.apply(x, _hidden(x, mask, fixed_triu_mask), scale)
    return result


@scaled_masked_softmax.backend(
    "npu",
    ("npu",),
    available=torch_npu_missing,
    contract=(
        Dtype("x", NPU_FLOATING),
        *(Size("x", dimension, 32, 4096) for dimension in (-1, -2)),
        *(Divisible("x", dimension, 32) for dimension in (-1, -2)),
    ),
)
def _npu(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    import torch_npu

    hidden = _hidden(x, mask, fixed_triu_mask)
    if hidden is None:
        hidden = torch.zeros(1, 1, *x.shape[-2:], dtype=torch.bool, device=x.device)
    result: Tensor = torch_npu.npu_scaled_masked_softmax(x, hidden, scale, fixed_triu_mask)
    return result
