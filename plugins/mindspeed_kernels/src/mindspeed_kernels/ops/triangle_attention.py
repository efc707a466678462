"""Causal attention by blocks of queries in plain operations, each with the keys up to its own end.

Scores above the diagonal are never computed: with ``G`` blocks, ``(G + 1) / (2 G)`` of the products and of
what is kept remain. It works on every device and with every dtype, where no flash kernel exists.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.contract import ContractError, Dtype, Range, Rank, SameDtype
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.scaled_masked_softmax import ScaledMaskedSoftmax


def triangle_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    block_size: int = 512,
    dropout: float = 0.0,
) -> Tensor:
    """Compute ``dropout(softmax(scale * query key^T)) value`` under a causal mask.

    Args:
        query: ``[s, b, n, d]``, floating.
        key: ``[s, b, g, d]`` with ``g`` dividing ``n``.
        value: ``[s, b, g, dv]``.
        scale: factor of the scores; by default ``1 / sqrt(d)``.
        block_size: queries per block; without meaning for the result.
        dropout: probability of dropping an attention weight.

    Returns:
        ``[s, b, n, dv]`` in the dtype of ``query``.

    Raises:
        ContractError: lengths or heads do not fit.
    """
    _check(query, key)
    wide = torch.promote_types(query.dtype, torch.float32)
    repeat = query.shape[2] // key.shape[2]
    keys, values = (
        tensor.permute(1, 2, 0, 3).repeat_interleave(repeat, dim=1).to(wide) for tensor in (key, value)
    )
    scores = query.permute(1, 2, 0, 3).to(wide) @ keys.transpose(-1, -2)
    scores = scores * (1.0 / math.sqrt(query.shape[3]) if scale is None else scale)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu_(1)
    weights = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), dropout)
    return (weights @ values).permute(2, 0, 1, 3).to(query.dtype)


def _by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    block_size: int = 512,
    dropout: float = 0.0,
) -> Tensor:
    _check(query, key)
    size, batch, heads, width = query.shape
    groups = key.shape[2]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    # [b, g, d, s] and [b, g, s, dv] are views: every block multiplies a prefix of the same tensors.
    keys, values = key.permute(1, 2, 3, 0), value.permute(1, 2, 0, 3)
    parts = []
    # Without any query the one block is empty, and its result still followed by autograd.
    for start in range(0, max(size, 1), block_size):
        end = min(start + block_size, size)
        block = (query[start:end] * scale).permute(1, 2, 0, 3)
        rows = block.reshape(batch, groups, heads // groups * (end - start), width)
        scores = torch.matmul(rows, keys[..., :end]).view(batch, heads, end - start, end)
        hidden = torch.ones(1, 1, end - start, end, dtype=torch.bool, device=query.device).triu_(start + 1)
        weights = ScaledMaskedSoftmax.apply(scores, hidden, 1.0, False)
        weights = F.dropout(weights, dropout).view(*rows.shape[:3], end)
        context = torch.matmul(weights, values[..., :end, :]).view(batch, heads, end - start, value.shape[3])
        parts.append(context.permute(2, 0, 1, 3))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _check(query: Tensor, key: Tensor) -> None:
    if query.shape[0] != key.shape[0] or query.shape[2] % key.shape[2] or query.shape[3] != key.shape[3]:
        raise ContractError(
            "triangle_attention[any]: key must have the length and width of query and a number of heads that "
            f"divides its, got {tuple(key.shape)} for {tuple(query.shape)}; nearest supported: "
            f"{(query.shape[0], query.shape[1], 1, query.shape[3])}"
        )


def _key(query: Tensor, *others: Any, **options: Any) -> tuple[Any, ...]:
    return query.device, query.dtype


def _samples(make: Make) -> list[Sample]:
    tensors = make(7, 2, 4, 8), make(7, 2, 2, 8), make(7, 2, 2, 6)
    return [Sample((*tensors, None, size)) for size in (1, 3, 7, 512)]


triangle_attention = Operator(
    "triangle_attention",
    triangle_attention_reference,
    contract=(
        Dtype("query"),
        SameDtype(("query", "key", "value")),
        Rank("query", 4, 4),
        Rank("key", 4, 4),
        Rank("value", 4, 4),
        Range("block_size", 1, 1 << 31),
        Range("dropout", 0.0, 1.0),
    ),
    key=_key,
    saved="queries, keys, values and the weights below the diagonal",
    samples=_samples,
)


triangle_attention.backend("triangle", ("*",))(_by_blocks)
