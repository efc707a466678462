"""The numbers of a row of logits that cross entropy needs, and its gradient, each in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_kernels.device_kernels.launching import blocks_of, launch, power_of_2

_BLOCK = 4096
"""Logits that a program reads at a time."""


@triton.jit
def _cross_entropy_statistics(
    logits, target, logsum, predicted, row_stride, first, width, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * row_stride
    # The largest logit of each lane so far, and the sum of exponentials beneath it.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(BLOCKS):
        column = number * BLOCK + tl.arange(0, BLOCK)
        found = tl.load(start + column, mask=column < width, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, found)
        # Where nothing is above minus infinity yet, differences of infinities would be no numbers.
        beneath = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - beneath) + tl.exp(found - beneath)
        top = higher
    whole = tl.max(top, 0)
    beneath = tl.where(whole == float("-inf"), 0.0, whole)
    summed = tl.sum(total * tl.exp(top - beneath), 0)
    tl.store(logsum + row, beneath + tl.log(summed))
    place = tl.load(target + row) - first
    local = (place >= 0) & (place < width)
    chosen = tl.load(start + tl.where(local, place, 0), mask=local, other=0.0).to(tl.float32)
    tl.store(predicted + row, chosen)


@triton.jit
def _cross_entropy_gradient(
    logits, target, logsum, of_loss, gradient, row_stride, first, width, blocks, BLOCK: tl.constexpr
):
    place = tl.program_id(0)
    row = (place // blocks).to(tl.int64)
    column = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    found = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(found - tl.load(logsum + row))
    share -= tl.where(column == tl.load(target + row) - first, 1.0, 0.0)
    share *= tl.load(of_loss + row)
    tl.store(gradient + row * width + column, share.to(gradient.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each row's sum of exponentials and the logit of its target.

    Args:
        logits: ``[r, v]`` in float16, bfloat16 or float32; the columns lie beside each other.
        target: ``[r]`` int64, contiguous.
        first: the id of the first column.

    Returns:
        ``[r]`` float32 twice; the second one is zero where the target is not among the columns.
    """
    logsum, predicted = (torch.empty(logits.shape[0], device=logits.device) for _ in range(2))
    if logits.numel():
        block = min(_BLOCK, power_of_2(logits.shape[1]))
        numbers = logits.stride(0), first, logits.shape[1]
        constants = blocks_of(logits.shape[1], block), block
        tensors = logits, target, logsum, predicted
        launch(_cross_entropy_statistics, (logits.shape[0],), tensors, numbers, constants, 8)
    return logsum, predicted


def gradient_of_logits(logits: Tensor, target: Tensor, logsum: Tensor, of_loss: Tensor, first: int) -> Tensor:
    """Return ``(softmax - onehot) * of_loss``, ``[r, v]`` in the dtype of the logits.

    Args:
        logits: as for `statistics`.
        target: likewise.
        logsum: ``[r]`` float32, of the whole vocabulary.
        of_loss: ``[r]`` float32, contiguous.
        first: the id of the first column.
    """
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel():
        block = min(_BLOCK, power_of_2(logits.shape[1]))
        blocks = blocks_of(logits.shape[1], block)
        numbers = logits.stride(0), first, logits.shape[1], blocks
        tensors = logits, target, logsum, of_loss, result
        launch(_cross_entropy_gradient, (logits.shape[0] * blocks,), tensors, numbers, (block,), 8)
    return result
