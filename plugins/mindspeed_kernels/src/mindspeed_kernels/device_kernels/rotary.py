"""Rotation of a tensor by angles in one pass over memory, whatever the order of its dimensions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_kernels.device_kernels.launching import blocks_of, launch, power_of_2

_ELEMENTS = 4096
"""Elements of a program, about."""


@triton.jit
def _numbers(place, mask):
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _halves(place, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Read rows of pairs; return the first and the second element of each."""
    return tl.split(tl.reshape(_numbers(place, mask), (ROWS, COLUMNS, 2)))


@triton.jit
def _rotary(
    x, cos, sin, y, size_1, size_2,
    x_0, x_1, x_2, cos_0, cos_1, cos_2, sin_0, sin_1, sin_2, y_0, y_1, y_2,
    half,
    PAIRS: tl.constexpr, BACK: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    i = (place // size_1).to(tl.int64)
    j = (place % size_1).to(tl.int64)
    k = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    start = x + i * x_0 + j * x_1 + k * x_2
    cosine = cos + i * cos_0 + j * cos_1
    sine = sin + i * sin_0 + j * sin_1
    if not SHARED:
        cosine += k * cos_2
        sine += k * sin_2
    target = y + i * y_0 + j * y_1 + k * y_2
    if PAIRS:
        # Whole rows are read and then taken apart: every second element of memory would be read slowly.
        both = tl.arange(0, 2 * COLUMNS)[None, :]
        inside = (k < size_2) & (both < 2 * half)
        # Angles that every k shares are read once.
        seen = both < 2 * half if SHARED else inside
        a, b = _halves(start + both, inside, ROWS, COLUMNS)
        cos_a, cos_b = _halves(cosine + both, seen, 1 if SHARED else ROWS, COLUMNS)
        sin_a, sin_b = _halves(sine + both, seen, 1 if SHARED else ROWS, COLUMNS)
    else:
        first = tl.arange(0, COLUMNS)[None, :]
        inside = (k < size_2) & (first < half)
        seen = first < half if SHARED else inside
        a, b = _numbers(start + first, inside), _numbers(start + first + half, inside)
        cos_a, cos_b = _numbers(cosine + first, seen), _numbers(cosine + first + half, seen)
        sin_a, sin_b = _numbers(sine + first, seen), _numbers(sine + first + half, seen)
    if BACK:
        turned_a = a * cos_a + b * sin_b
        turned_b = b * cos_b - a * sin_a
    else:
        turned_a = a * cos_a - b * sin_a
        turned_b = b * cos_b + a * sin_b
    kind = y.dtype.element_ty
    if PAIRS:
        turned = tl.reshape(tl.join(turned_a, turned_b), (ROWS, 2 * COLUMNS))
        tl.store(target + both, turned.to(kind), mask=inside)
    else:
        tl.store(target + first, turned_a.to(kind), mask=inside)
        tl.store(target + first + half, turned_b.to(kind), mask=inside)


def rotate_at_once(x: Tensor, cos: Tensor, sin: Tensor, mode: int, *, backward: bool) -> Tensor:
    """Rotate ``x``, or a gradient back.

    Args:
        x: ``[a, b, c, d]`` with any strides whose last one is 1; float16, bfloat16 or float32.
        cos: ``[a | 1, b | 1, c | 1, d]``, last stride 1.
        sin: likewise.
        mode: 0 pairs dimension ``i`` with ``i + d / 2``, 1 pairs ``2 i`` with ``2 i + 1``.
        backward: apply the transposed rotation.

    Returns:
        Shape and dtype of ``x``, contiguous.
    """
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return result
    # The dimension that programs walk along is one whose angles are the same, the longest of these.
    sizes = x.shape[:3]
    free = [size if cos.shape[n] == sin.shape[n] == 1 else 0 for n, size in enumerate(sizes)]
    inner = free.index(max(free)) if max(free) > 1 else 2
    outer = [n for n in range(3) if n != inner]
    order = (*outer, inner)
    half = x.shape[3] // 2
    columns = power_of_2(half)
    rows = min(power_of_2(sizes[inner]), max(1, _ELEMENTS // (2 * columns)))

    def strides(tensor: Tensor) -> list[int]:
        return [tensor.stride(n) if tensor.shape[n] > 1 else 0 for n in order]

    tensors = x, cos, sin, result
    sizes_and_strides = sizes[outer[1]], sizes[inner], *(n for tensor in tensors for n in strides(tensor))
    grid = sizes[outer[0]] * sizes[outer[1]], blocks_of(sizes[inner], rows)
    constants = mode == 1, backward, max(free) > 1, rows, columns
    launch(_rotary, grid, tensors, (*sizes_and_strides, half), constants, 4)
    return result
