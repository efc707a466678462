"""SwiGLU in one pass over memory each way: the input is read once, the result written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_kernels.device_kernels.launching import blocks_of, launch

_BLOCK = 1024
"""Columns of a program: with four warps 16 bytes of each half for a thread."""


@triton.jit
def _swiglu_forward(x, y, x_row, width, blocks, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = (place // blocks).to(tl.int64)
    column = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = x + row * x_row + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(start + width, mask=inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * value
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(x, dy, dx, x_row, dy_row, width, blocks, BLOCK: tl.constexpr):
    place = tl.program_id(0)
    row = (place // blocks).to(tl.int64)
    column = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    start = x + row * x_row + column
    gate = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(start + width, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(dy + row * dy_row + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    to_gate = outer * value * share * (1.0 + gate * (1.0 - share))
    to_value = outer * gate * share
    target = dx + row * 2 * width + column
    tl.store(target, to_gate.to(dx.dtype.element_ty), mask=inside)
    tl.store(target + width, to_value.to(dx.dtype.element_ty), mask=inside)


def swiglu_forward(rows: Tensor) -> Tensor:
    """Return ``silu(a) * b`` of rows ``[a | b]``.

    Args:
        rows: ``[r, 2 f]`` in float16, bfloat16 or float32; the columns lie beside each other.

    Returns:
        ``[r, f]`` in their dtype.
    """
    width = rows.shape[1] // 2
    result = rows.new_empty(rows.shape[0], width)
    if result.numel():
        blocks = blocks_of(width, _BLOCK)
        numbers = rows.stride(0), width, blocks
        launch(_swiglu_forward, (rows.shape[0] * blocks,), (rows, result), numbers, (_BLOCK,), 4)
    return result


def swiglu_backward(rows: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient ``[r, 2 f]`` of rows for that of the result ``[r, f]``."""
    width = gradient.shape[1]
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if result.numel():
        blocks = blocks_of(width, _BLOCK)
        numbers = rows.stride(0), gradient.stride(0), width, blocks
        tensors = rows, gradient, result
        launch(_swiglu_backward, (rows.shape[0] * blocks,), tensors, numbers, (_BLOCK,), 4)
    return result
