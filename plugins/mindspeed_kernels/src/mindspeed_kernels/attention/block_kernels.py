"""The kernels that compute one block of queries: torch's flash attention for CPUs, and matrix products.

Both give the context and per row the logarithm of the sum of exponentials; their backward takes these of the
whole row, whatever part of the keys the block holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.attention.blocks import AttentionCall, Block, Mask
from mindspeed_megatron.planned_kernels import kernels_for

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""For a block's backward: the context's gradient, query, key, value, context and logarithm of the sums."""


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, block: Block, attention: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Return context ``[b, n, sq, d]`` and logarithm of the sums ``[b, n, sq]`` of a block, on CPUs."""
    context, logsum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *map(_in_rows, (query, key, value)),
        0.0,
        block.causal,
        attn_mask=_for_kernel(mask.added, query),
        scale=attention.scale,
    )
    return context, logsum


def flash_backward(tensors: Saved, mask: Mask, block: Block, attention: AttentionCall) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values of a block, on CPUs."""
    added = _for_kernel(mask.added, tensors[1])
    found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_in_rows, tensors[:5]), tensors[5], 0.0, block.causal, attn_mask=added, scale=attention.scale
    )
    return found


def _in_rows(tensor: Tensor) -> Tensor:
    """Copy a tensor whose rows are not contiguous: the kernel reads them as if they were, without a word."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _for_kernel(mask: Tensor | None, query: Tensor) -> Tensor | None:
    wide = torch.promote_types(query.dtype, torch.float32)
    return None if mask is None else mask.to(wide)


def product_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, block: Block, attention: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Return context and logarithm of the sums of a block, by matrix products."""
    scores = _scores(query, key, mask, attention)
    logsum = scores.logsumexp(-1)
    # Rows without a visible key: exp(-inf - inf) is zero, exp(-inf + inf) would not be a number.
    logsum = logsum.masked_fill(logsum == float("-inf"), float("inf"))
    weights = scores.sub_(logsum.unsqueeze(-1)).exp_()
    kept = _kept(weights, block, attention)
    if kept is not None:
        weights = weights * kept
    return _grouped(weights.to(value.dtype), value.shape[1]).matmul(value).view(
        *query.shape[:3], value.shape[3]
    ), logsum


def product_backward(
    tensors: Saved, mask: Mask, block: Block, attention: AttentionCall
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys, values and scores of a block, by matrix products."""
    gradient, query, key, value, context, logsum = tensors
    groups = key.shape[1]
    weights = _scores(query, key, mask, attention).sub_(logsum.unsqueeze(-1)).exp_()
    delta = (gradient.to(weights.dtype) * context.to(weights.dtype)).sum(-1, keepdim=True)
    outer = _grouped(gradient.to(value.dtype), groups)
    to_weights = outer.matmul(value.transpose(-1, -2)).view(weights.shape).to(weights.dtype)
    kept = _kept(weights, block, attention)
    used = weights if kept is None else weights * kept
    to_value = _grouped(used.to(value.dtype), groups).transpose(-1, -2).matmul(outer)
    to_weights = to_weights if kept is None else to_weights * kept
    to_scores = to_weights.sub_(delta).mul_(weights)
    grouped = _grouped(to_scores.to(key.dtype), groups)
    to_query = grouped.matmul(key).view(query.shape) * attention.scale
    to_key = grouped.transpose(-1, -2).matmul(_grouped(query, groups)) * attention.scale
    return to_query, to_key, to_value, to_scores


def _scores(query: Tensor, key: Tensor, mask: Mask, attention: AttentionCall) -> Tensor:
    """Return ``[b, n, sq, sk]`` in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    if kernels_for(query.device.type) == "cpu":
        query, key = query.to(wide), key.to(wide)
    grouped = _grouped(query, key.shape[1])
    scores = grouped.matmul(key.transpose(-1, -2)).view(*query.shape[:3], key.shape[2]).to(wide)
    scores = scores * attention.scale
    return scores if mask.added is None else scores.add_(mask.added)


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """Return ``[b, n, s, x]`` as ``[b, g, n / g * s, x]``: queries that share keys follow one another."""
    samples, heads, length, width = tensor.shape
    return tensor.reshape(samples, groups, heads // groups * length, width)


def _kept(weights: Tensor, block: Block, attention: AttentionCall) -> Tensor | None:
    """Return the factors of kept weights, zero for dropped ones; the same when a block is computed again."""
    if not attention.drops:
        return None
    if attention.kept is not None:
        kept = block.of_rows(attention.kept)[..., slice(*block.columns)]
        return kept.to(weights.dtype) / attention.keep
    generator = torch.Generator(weights.device).manual_seed(attention.seed + block.number)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device) < attention.keep
    return drawn.to(weights.dtype) / attention.keep
