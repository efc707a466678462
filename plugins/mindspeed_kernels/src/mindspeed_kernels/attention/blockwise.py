"""Attention block by block of queries (Dao et al., 2022): no score matrix, any mask, bias, dropout and sink.

Forward returns the context and one number per row, the logarithm of the sum of exponentials; backward needs
nothing else than these two and the inputs, so blocks of one attention may even live on different ranks. On
CPUs torch's flash kernel computes each block; elsewhere, and with dropout or a gradient of the bias, matrix
products do. Shapes: queries and gradients ``[b, n, sq, d]``, keys ``[b, g, sk, d]``; ``g`` divides ``n``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.attention.block_kernels import (
    flash_backward,
    flash_forward,
    product_backward,
    product_forward,
)
from mindspeed_kernels.attention.blocks import AttentionCall, Block, blocks_of, mask_of
from mindspeed_megatron.equal_blocks import run_blocks
from mindspeed_megatron.planned_kernels import kernels_for


def _with_flash(query: Tensor, attention: AttentionCall, bias_gradient: bool) -> bool:
    return kernels_for(query.device.type) == "cpu" and not attention.drops and not bias_gradient


class BlockwiseAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the context and one number per row."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sink: Tensor | None,
        attention: AttentionCall,
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            ctx: of autograd.
            query: ``[b, n, sq, d]``.
            key: ``[b, g, sk, d]``.
            value: ``[b, g, sk, dv]``.
            bias: the tensor of ``attention.bias``, for its gradient.
            sink: ``[n]``, a score that takes part in the softmax and has no value.
            attention: everything else.

        Returns:
            The context ``[b, n, sq, dv]`` and the logarithm of the sum of exponentials ``[b, n, sq]`` in
            float32, which is infinite for rows that see nothing; their context is zero.
        """
        context, logsum = attend(query, key, value, sink, attention)
        ctx.save_for_backward(query, key, value, bias, sink, context, logsum)
        ctx.attention = attention
        ctx.mark_non_differentiable(logsum)
        return context, logsum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the three inputs, of the bias tensor and of the sink."""
        query, key, value, bias, sink, context, logsum = ctx.saved_tensors
        bias = bias if ctx.needs_input_grad[3] else None
        sink = sink if ctx.needs_input_grad[4] else None
        found = attend_backward(gradients[0], query, key, value, bias, sink, context, logsum, ctx.attention)
        return (*found, None)


def attend(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None, attention: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Compute context and logarithm of the sums of exponentials; see `BlockwiseAttention.forward`."""
    batch, heads, sq, _ = query.shape
    width = value.shape[3]
    flash = _with_flash(query, attention, False)
    value = _padded(value, query.shape[3]) if flash else value
    kernel = flash_forward if flash else product_forward
    blocks = blocks_of(attention, heads, flash)
    whole = _covers(blocks, query, key)
    wide = torch.promote_types(query.dtype, torch.float32)
    if not whole:
        result = query.new_zeros(batch, heads, sq, width)
        logsums = query.new_full((batch, heads, sq), float("inf"), dtype=wide)
    for block in run_blocks(blocks, _shape):
        mask = mask_of(attention, block, query.device)
        inputs = block.of_rows(query), block.of_columns(key), block.of_columns(value)
        context, logsum = kernel(*inputs, mask, block, attention)
        if mask.empty is not None:
            context = context.masked_fill(mask.empty.unsqueeze(-1), 0.0)
            logsum = logsum.masked_fill(mask.empty, float("inf"))
        if whole:
            result, logsums = context[..., :width], logsum
        else:
            block.of_rows(result).copy_(context[..., :width])
            block.of_rows(logsums).copy_(logsum)
    return with_sink(result, logsums, sink)


def _shape(block: Block) -> tuple[object, ...]:
    return block.shape


def _covers(blocks: list[Block], query: Tensor, key: Tensor) -> bool:
    """Return whether there is one block, of all queries and all keys."""
    if len(blocks) != 1:
        return False
    block = blocks[0]
    sizes = block.of_rows(query).shape[2], block.of_columns(key).shape[2]
    return sizes == (query.shape[2], key.shape[2])


def with_sink(context: Tensor, logsum: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add to an attention a further score of every row, ``sink`` ``[n]``, that takes part in the softmax."""
    if sink is None:
        return context, logsum
    score = sink.to(logsum.dtype).view(1, -1, 1)
    known = logsum.masked_fill(logsum.isinf(), float("-inf"))
    total = torch.logaddexp(known, score)
    return context * (known - total).exp().unsqueeze(-1).to(context.dtype), total


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    context: Tensor,
    logsum: Tensor,
    attention: AttentionCall,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of queries, keys, values, and of the bias tensor and the sink where given.

    ``context`` and ``logsum`` may be those of a larger attention of which these keys are one part.
    """
    heads, width = query.shape[1], value.shape[3]
    flash = _with_flash(query, attention, bias is not None)
    blocks = blocks_of(attention, heads, flash)
    if flash:
        value, context, gradient = (_padded(item, query.shape[3]) for item in (value, context, gradient))
    kernel = flash_backward if flash else product_backward
    to_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    sums = None
    if not _covers(blocks, query, key):
        sums = torch.zeros_like(query), _sums_like(key), _sums_like(value)
    to_query, to_key, to_value = sums or (query, key, value)
    for block in run_blocks(blocks, _shape):
        mask = mask_of(attention, block, query.device)
        outer, inner = block.of_rows, block.of_columns
        tensors = outer(gradient), outer(query), inner(key), inner(value), outer(context), outer(logsum)
        found = kernel(tensors, mask, block, attention)
        if to_bias is not None:
            _add_to_bias(to_bias, found[3], block, attention)
        if sums is None:
            to_query, to_key, to_value = found[:3]
        else:
            block.of_rows(sums[0]).copy_(found[0])
            block.of_columns(sums[1]).add_(found[1])
            block.of_columns(sums[2]).add_(found[2])
    to_sink = None
    if sink is not None:
        weight = (sink.to(logsum.dtype).view(1, -1, 1) - logsum).exp()
        delta = (gradient.to(weight.dtype) * context.to(weight.dtype)).sum(-1)
        to_sink = -(weight * delta).sum((0, 2)).to(sink.dtype)
    return (
        to_query,
        to_key.to(key.dtype),
        to_value[..., :width].to(value.dtype),
        None if to_bias is None or bias is None else to_bias.to(bias.dtype),
        to_sink,
    )


def _sums_like(tensor: Tensor) -> Tensor:
    """Allocate the sum over blocks of a gradient, in at least float32."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def _padded(tensor: Tensor, width: int) -> Tensor:
    # The kernel wants one width of keys and values; added columns of zeros change nothing else.
    missing = width - tensor.shape[3]
    return tensor if not missing else torch.nn.functional.pad(tensor, (0, missing))


def _add_to_bias(total: Tensor, to_scores: Tensor, block: Block, attention: AttentionCall) -> None:
    """Add a block's gradient of the scores to that of the bias tensor, summed over what was broadcast."""
    assert attention.bias is not None
    part = to_scores if total.shape[0] > 1 else to_scores.sum(0, keepdim=True)
    rows = slice(*block.rows)
    if total.shape[2] == 1:
        part, rows = part.sum(2, keepdim=True), slice(0, 1)
    total[:, :, rows, slice(*block.columns)] += part * attention.bias.factor
