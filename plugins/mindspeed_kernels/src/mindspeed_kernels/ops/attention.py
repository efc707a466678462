"""Attention without a score matrix in memory (Dao et al., 2022), for causal, full and sliding-window masks.

Layout is megatron-core's: ``[s, b, n, d]``, key and value with fewer heads under grouped-query attention.
Shape suffixes below: S sequence, B batch, N heads, D head width.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.contract import NPU_FLOATING, Dtype, SameDtype
from mindspeed_kernels.ops.operator import Make, Operator, Sample

_NPU_MASK_SIZE = 2048
"""Side of the compressed mask that the NPU kernel expands itself."""


def attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``dropout(softmax(scale * query key^T)) value`` per head.

    Query ``i`` of ``sq`` stands at position ``i + sk - sq`` of the keys, so that fewer queries than keys are
    the last ones.

    Args:
        query: ``[sq, b, n, d]``, any floating dtype.
        key: ``[sk, b, g, d]`` with ``g`` dividing ``n``.
        value: ``[sk, b, g, dv]``.
        scale: factor of the scores; by default ``1 / sqrt(d)``.
        causal: hide keys behind the query's position.
        window: ``(left, right)``: hide keys more than ``left`` before or ``right`` behind the position; -1 is
            no limit.
        dropout: probability of dropping an attention weight.

    Returns:
        ``[sq, b, n, dv]`` in the dtype of ``query``.

    Raises:
        ValueError: shapes do not fit together.
    """
    _check(query, key, value)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    repeat = query.shape[2] // key.shape[2]
    query_BNSD = query.permute(1, 2, 0, 3).to(wide)
    key_BNSD = key.permute(1, 2, 0, 3).repeat_interleave(repeat, dim=1).to(wide)
    value_BNSD = value.permute(1, 2, 0, 3).repeat_interleave(repeat, dim=1).to(wide)
    scores = query_BNSD @ key_BNSD.transpose(-1, -2) * _scale(query, scale)
    left, right = _limits(causal, window)
    visible = _visible(query.shape[0], key.shape[0], left, right, query.device)
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    context = F.dropout(weights, dropout) @ value_BNSD
    return context.permute(2, 0, 1, 3).to(query.dtype)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    _check(query, key, value)
    left, right = _limits(causal, window)
    sq, sk = query.shape[0], key.shape[0]
    if left is not None and left < sk - 1:
        return _banded(query, key, value, _scale(query, scale), left, right, dropout)
    if right is not None and right >= sk - 1:
        right = None
    plain_causal = right == 0 and sq == sk
    mask = None if right is None or plain_causal else _visible(sq, sk, None, right, query.device)
    return _sdpa_call(query, key, value, _scale(query, scale), mask, plain_causal, dropout)


def _sdpa_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
) -> Tensor:
    context_BNSD = F.scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return context_BNSD.permute(2, 0, 1, 3)


def _banded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    left: int,
    right: int | None,
    dropout: float,
) -> Tensor:
    """Attend block by block of queries, each to the keys its window reaches: no ``sq x sk`` mask."""
    sq, sk = query.shape[0], key.shape[0]
    block = max(128, left + 1)
    parts = []
    for start in range(0, sq, block):
        end = min(start + block, sq)
        first = max(0, start + sk - sq - left)
        last = sk if right is None else min(sk, end + sk - sq + right)
        rows = torch.arange(start + sk - sq, end + sk - sq, device=query.device).unsqueeze(1)
        columns = torch.arange(first, last, device=query.device).unsqueeze(0)
        mask = columns >= rows - left
        if right is not None:
            mask &= columns <= rows + right
        keys, values = key[first:last], value[first:last]
        parts.append(_sdpa_call(query[start:end], keys, values, scale, mask, False, dropout))
    return torch.cat(parts)


def _npu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    dropout: float = 0.0,
) -> Tensor:
    import torch_npu

    _check(query, key, value)
    sq, sk, heads = query.shape[0], key.shape[0], query.shape[2]
    left, right = _limits(causal, window)
    limit = max(sq, sk)
    if left is None and right is None:
        # Mode 0 without a mask: everything is visible.
        mode, mask = 0, None
    else:
        mask = _npu_mask(query.device)
        # Mode 3 is causal with the origin at the last query, mode 4 a band with the same origin.
        mode = 3 if left is None and right == 0 else 4
    context_BNSD = torch_npu.npu_fusion_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        heads,
        "BNSD",
        atten_mask=mask,
        scale=_scale(query, scale),
        keep_prob=1.0 - dropout,
        pre_tockens=limit if left is None else left,
        next_tockens=limit if right is None else right,
        sparse_mode=mode,
    )[0]
    result: Tensor = context_BNSD.permute(2, 0, 1, 3)
    return result


@lru_cache
def _npu_mask(device: torch.device) -> Tensor:
    return torch.ones(_NPU_MASK_SIZE, _NPU_MASK_SIZE, dtype=torch.bool, device=device).triu(1)


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        raise ValueError(f"attention: query, key and value are [s, b, n, d], got {shapes}")
    if key.shape[:3] != value.shape[:3] or query.shape[2] % key.shape[2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} "
            "do not fit: key and value share s, b and heads, query and key the width, and the heads of key "
            "divide those of query"
        )


def _scale(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _limits(causal: bool, window: tuple[int, int] | None) -> tuple[int | None, int | None]:
    left, right = window if window is not None else (-1, -1)
    if causal:
        right = 0
    return (None if left < 0 else left), (None if right < 0 else right)


def _visible(sq: int, sk: int, left: int | None, right: int | None, device: torch.device) -> Tensor:
    rows = torch.arange(sk - sq, sk, device=device).unsqueeze(1)
    columns = torch.arange(sk, device=device).unsqueeze(0)
    visible = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left is not None:
        visible &= columns >= rows - left
    if right is not None:
        visible &= columns <= rows + right
    return visible


def _samples(make: Make) -> list[Sample]:
    tensors = make(6, 2, 4, 16), make(6, 2, 2, 16), make(6, 2, 2, 16)
    return [Sample(tensors), Sample(tensors, {"causal": False}), Sample(tensors, {"window": (2, 0)})]


attention = Operator(
    "attention",
    attention_reference,
    contract=(Dtype("query"), SameDtype(("query", "key", "value"))),
    saved="query, key, value, the result and one number per row",
    samples=_samples,
)
attention.backend("sdpa", ("cpu", "cuda"))(_sdpa)
attention.backend("npu", ("npu",), available=torch_npu_missing, contract=(Dtype("query", NPU_FLOATING),))(
    _npu
)
