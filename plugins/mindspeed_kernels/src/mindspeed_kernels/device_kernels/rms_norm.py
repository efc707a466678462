"""RMSNorm in one pass over memory each way; the gradient of the scale is summed up program by program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_kernels.device_kernels.launching import blocks_of, launch, power_of_2

_PROGRAMS = 1024
"""Programs of backward, about; each sums the scale's gradient over the rows it walks through."""


@triton.jit
def _rms_norm_forward(x, gamma, y, rstd, x_row, width, eps, CENTERED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        scale += 1.0
    factor = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(rstd + row, factor)
    tl.store(y + row * width + column, (values * factor * scale).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward(
    x, gamma, rstd, dy, dx, shares, x_row, dy_row, rows, width,
    CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        scale += 1.0
    share = tl.zeros((BLOCK,), tl.float32)
    for number in range(ROWS):
        row = program * ROWS + number
        here = inside & (row < rows)
        values = tl.load(x + row * x_row + column, mask=here, other=0.0).to(tl.float32)
        outer = tl.load(dy + row * dy_row + column, mask=here, other=0.0).to(tl.float32)
        factor = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = values * factor
        share += outer * normed
        scaled = outer * scale
        mean = tl.sum(scaled * normed, 0) / width
        to_x = (scaled - normed * mean) * factor
        tl.store(dx + row * width + column, to_x.to(dx.dtype.element_ty), mask=here)
    tl.store(shares + program * width + column, share, mask=inside)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def rms_norm_forward(rows: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Normalize and scale rows.

    Args:
        rows: ``[r, h]`` in float16, bfloat16 or float32, ``h`` at most 16384; columns beside each other.
        gamma: ``[h]``, contiguous, of one of these dtypes.
        eps: added to the mean square.
        zero_centered: scale with ``1 + gamma``.

    Returns:
        ``[r, h]`` in the dtype of the rows, and each row's reciprocal root mean square, ``[r]`` float32.
    """
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    rstd = torch.empty(rows.shape[0], device=rows.device)
    if rows.numel():
        block = power_of_2(rows.shape[1])
        tensors, numbers = (rows, gamma, result, rstd), (rows.stride(0), rows.shape[1], eps)
        launch(_rms_norm_forward, (rows.shape[0],), tensors, numbers, (zero_centered, block), _warps(block))
    return result, rstd


def rms_norm_backward(
    rows: Tensor, gamma: Tensor, rstd: Tensor, gradient: Tensor, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows ``[r, h]`` in their dtype and of the scale ``[h]`` in float32."""
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    count, width = rows.shape
    if not rows.numel():
        return result, torch.zeros(width, device=rows.device)
    # A power of two, so that batches of other lengths compile no kernels of their own.
    each = power_of_2(blocks_of(count, _PROGRAMS))
    programs, block = blocks_of(count, each), power_of_2(width)
    shares = torch.empty(programs, width, device=rows.device)
    tensors = rows, gamma, rstd, gradient, result, shares
    numbers = rows.stride(0), gradient.stride(0), count, width
    launch(_rms_norm_backward, (programs,), tensors, numbers, (zero_centered, each, block), _warps(block))
    return result, shares.sum(0)
