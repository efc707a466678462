"""Fused attention: every sparse mode, layout, bias, dropout and sink, with the numbers that rings need.

Names, order and meaning of the arguments are those of the fused attention kernels for Ascend devices. Besides
the context the operator returns per row a maximum and a sum of the scores' exponentials. Any pair ``(m, s)``
with the right ``m + log s`` is as good as any other: merging blocks of keys and computing gradients use
nothing else. So backends that know only the logarithm ``l`` of the sum return ``(l, 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mindspeed_kernels.attention.arguments import (
    OPERATOR,
    kernel_switches,
    options_of,
    prepare,
)
from mindspeed_kernels.attention.blockwise import BlockwiseAttention
from mindspeed_kernels.attention.cuda import flash_attention, flash_limits, flex_limits
from mindspeed_kernels.attention.cudnn import cudnn_attention, cudnn_limits, cudnn_missing
from mindspeed_kernels.attention.layouts import LAYOUTS, from_bnsd
from mindspeed_kernels.attention.npu_limits import kernel_refusal, warn_of
from mindspeed_kernels.attention.packed_ends import at_ends, used_ends
from mindspeed_kernels.attention.reference import dense_attention
from mindspeed_kernels.attention.service import npu_attention
from mindspeed_kernels.attention.visibility import UNLIMITED
from mindspeed_kernels.contract import NPU_FLOATING, Choice, Dtype, Range, Rank, SameDtype
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.operator import Make, Operator, Sample

Result = tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]


def fusion_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tokens: int = UNLIMITED,
    next_tokens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Sequence[int] | Tensor | None = None,
    actual_seq_qlen: Sequence[int] | Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    pse_type: int = 1,
    q_start_idx: Sequence[int] | int | None = None,
    kv_start_idx: Sequence[int] | int | None = None,
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> Result:
    """Compute ``dropout(softmax(scores)) value`` per head, without a score matrix in memory.

    Scores are ``scale * (query key^T + pse)`` for ``pse_type`` 1 and ``scale * query key^T + pse`` otherwise.
    Rows that see no key are zero.

    Args:
        query: ``[s, b, n d]`` (SBH), ``[b, s, n d]`` (BSH), ``[b, n, s, d]`` (BNSD), ``[b, s, n, d]`` (BSND),
            ``[s, b, n, d]`` (SBND) or ``[t, n, d]`` (TND, packed sequences); floating.
        key: likewise, of as many or fewer heads that divide those of ``query``, with its own length.
        value: likewise, of heads that may be narrower.
        head_num: heads ``n`` of ``query``.
        input_layout: the layout, in any case.
        pse: added to the scores: ``[b | 1, n, sq | 1, sk]``; the last 1024 rows of it where it depends on
            the distance only; slopes ``[n]`` or ``[b, n]`` for ``pse_type`` 2 and 3.
        padding_mask: must be None.
        atten_mask: ``[sq, sk]`` or ``[b | 1, n | 1, sq, sk]``, bool or uint8, True hides; used in modes 0
            and 1. The other modes need none.
        scale: factor of the scores.
        keep_prob: probability of keeping an attention weight.
        pre_tokens: how many keys before its position a query sees, in bands.
        next_tokens: how many behind.
        inner_precise: without meaning outside of NPUs.
        prefix: per sample, leading keys that every query sees, in modes 5 and 6.
        actual_seq_qlen: where each packed sequence of queries ends, without leading zero (TND). Zeros behind
            the last end leave the tokens behind it out: their context is zero.
        actual_seq_kvlen: the same of keys.
        sparse_mode: 0 to 8, see `mindspeed_kernels.attention.visibility`.
        gen_mask_parallel: without meaning outside of NPUs.
        sync: without meaning outside of NPUs.
        pse_type: 0 and 1: ``pse`` as above; 2: ``-slope * |distance|``; 3: ``-slope * sqrt |distance|``.
        q_start_idx: position of the first query, for the distance.
        kv_start_idx: position of the first key.
        sink: ``[n]``, a further score of every row that takes part in the softmax and has no value.
        dropout_mask: ``[b, n, sq, sk]`` bool, the weights to keep, instead of random ones. NPUs then compute
            by matrix products, because the fused kernel's backward draws such masks itself.

    Returns:
        ``(context, maximum, sum, reserved, seed, offset, numels)``: the context in the layout of ``query``;
        ``[b, n, sq, 8]`` float32 twice (TND: ``[t, n, 8]``), every number eight times; an empty tensor; what
        the backward operator needs to drop the same weights again.

    Raises:
        ContractError: arguments do not fit together, or are not supported.
    """
    options = options_of(
        head_num,
        input_layout,
        pse=pse,
        padding_mask=padding_mask,
        atten_mask=atten_mask,
        scale=scale,
        keep_prob=keep_prob,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        prefix=prefix,
        actual_seq_qlen=actual_seq_qlen,
        actual_seq_kvlen=actual_seq_kvlen,
        sparse_mode=sparse_mode,
        pse_type=pse_type,
        q_start_idx=q_start_idx,
        kv_start_idx=kv_start_idx,
        sink=sink,
        dropout_mask=dropout_mask,
    )
    inputs = prepare(query, key, value, options)
    context, maximum, total = dense_attention(inputs, sink)
    return _result(context, maximum, total, options.layout, 0)


def _result(context: Tensor, maximum: Tensor, total: Tensor, layout: str, seed: int) -> Result:
    if layout == "TND":
        maximum, total = (item.squeeze(0).transpose(0, 1) for item in (maximum, total))
    maximum, total = (item.unsqueeze(-1).expand(*item.shape, 8) for item in (maximum, total))
    return from_bnsd(context, layout), maximum, total, context.new_empty(0), seed, 0, 0


def stats_of(logsum: Tensor) -> tuple[Tensor, Tensor]:
    """Return maximum and sum that stand for the logarithm of a sum; the sum of empty rows is zero."""
    empty = logsum == float("inf")
    lowest = torch.finfo(logsum.dtype).min
    return logsum.masked_fill(empty, lowest), torch.ones_like(logsum).masked_fill(empty, 0.0)


def _full_rows(logsum: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `stats_of` does where no row is empty, without a pass over the rows."""
    return logsum, logsum.new_ones(()).expand_as(logsum)


def logsum_of(maximum: Tensor, total: Tensor) -> Tensor:
    """Return the logarithm of a sum, infinite for rows that see nothing."""
    return torch.where(
        total > 0, maximum + total.clamp_min(torch.finfo(total.dtype).tiny).log(), float("inf")
    )


def comparable(result: Result) -> tuple[Tensor, Tensor]:
    """Return what all backends agree on: the context, and the logarithm of the sum."""
    return result[0], logsum_of(result[1], result[2])


def _samples(make: Make) -> list[Sample]:
    sbh = make(6, 2, 32), make(6, 2, 16), make(6, 2, 16)
    bnsd = make(1, 2, 5, 8), make(1, 2, 7, 8), make(1, 2, 7, 4)
    packed = make(7, 2, 8), make(9, 1, 8), make(9, 1, 8)
    lengths = {"actual_seq_qlen": [3, 3, 7], "actual_seq_kvlen": [4, 4, 9]}
    mask = torch.zeros(5, 7, dtype=torch.bool, device=bnsd[0].device)
    return [
        Sample((*sbh, 4, "SBH"), {"scale": 0.35, "sparse_mode": 2}),
        Sample((*bnsd, 2, "BNSD"), {"sparse_mode": 3}),
        Sample((*bnsd, 2, "BNSD"), {"atten_mask": mask, "pre_tokens": 2, "next_tokens": 1}),
        Sample((*bnsd, 2, "BNSD"), {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 0}),
        Sample((*bnsd, 2, "BNSD"), {"sparse_mode": 6, "prefix": [3]}),
        Sample((*bnsd, 2, "BNSD"), {"pse": make(1, 2, 5, 7), "scale": 0.5}),
        Sample((*bnsd, 2, "BNSD"), {"sink": make(2)}),
        Sample((*packed, 2, "TND"), {"sparse_mode": 3, **lengths}),
        Sample((*packed, 2, "TND"), {"sparse_mode": 8, "pre_tokens": 2, "next_tokens": 0, **lengths}),
    ]


def _key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    atten_mask: Tensor | None = None,
    keep_prob: float = 1.0,
    sparse_mode: int = 0,
    pse_type: int = 1,
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    drops = keep_prob < 1.0 or dropout_mask is not None
    given = pse is None, atten_mask is None, sink is None
    return query.device, query.dtype, key.dtype, query.ndim, input_layout, sparse_mode, pse_type, drops, given


npu_fusion_attention = Operator(
    OPERATOR,
    fusion_attention_reference,
    contract=(
        Dtype("query"),
        SameDtype(("query", "key", "value")),
        Rank("query", 3, 4),
        Choice("input_layout", LAYOUTS),
        Range("sparse_mode", 0, 8),
        Range("pse_type", 0, 3),
        Range("keep_prob", 0.0, 1.0),
    ),
    key=_key,
    saved="query, key, value, the context and one number per row",
    samples=_samples,
    comparable=comparable,
)


@npu_fusion_attention.backend("blocks", ("cpu", "cuda", "npu"))
@at_ends
def _blocks(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **given: Any
) -> Result:
    options = options_of(head_num, input_layout, **given)
    random = options.keep_prob < 1.0 and options.dropout_mask is None
    if random and torch.compiler.is_compiling():
        # A seed is a number, which a graph cannot hold; the compiler can repeat random weights itself.
        context, maximum, total = dense_attention(prepare(query, key, value, options), options.sink)
        return _result(context, maximum, total, options.layout, 0)
    # Drawn from the generator of the device, so that recomputation and parallel ranks behave as with dropout.
    seed = int(torch.randint(1 << 52, (), device=query.device)) if random else 0
    inputs = prepare(query, key, value, options, seed)
    bias = options.pse if options.pse is not None and options.pse.requires_grad else None
    context, logsum = BlockwiseAttention.apply(
        inputs.query, inputs.key, inputs.value, bias, options.sink, inputs.attention
    )
    return _result(context, *stats_of(logsum), options.layout, seed)


@npu_fusion_attention.backend("flash", ("cuda",), priority=10, supports=flash_limits)
def _flash(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **given: Any
) -> Result:
    options = options_of(head_num, input_layout, **given)
    found = flash_attention(query, key, value, options)
    if found is None:
        return cast(Result, _blocks(query, key, value, head_num, input_layout, **given))
    context, logsum, empty = found
    return _result(context, *(stats_of(logsum) if empty else _full_rows(logsum)), options.layout, 0)


@npu_fusion_attention.backend(
    "cudnn", ("cuda",), priority=20, available=cudnn_missing, supports=cudnn_limits, deterministic=False
)
def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **given: Any
) -> Result:
    options = options_of(head_num, input_layout, **given)
    found = cudnn_attention(query, key, value, options)
    if found is None:
        return _flash(query, key, value, head_num, input_layout, **given)
    # Every query of a causal or complete mask sees a key.
    return _result(found[0], *_full_rows(found[1]), options.layout, 0)


@npu_fusion_attention.backend("flex", ("cuda",), priority=-10, supports=flex_limits)
def _flex(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **given: Any
) -> Result:
    # Importing it takes as long as importing torch's compiler.
    from mindspeed_kernels.attention.flex import flex

    options = options_of(head_num, input_layout, **given)
    if used_ends(options, query, key):
        return cast(Result, _blocks(query, key, value, head_num, input_layout, **given))
    context, logsum = flex(prepare(query, key, value, options), options.sink)
    return _result(context, *stats_of(logsum.detach()), options.layout, 0)


@npu_fusion_attention.backend(
    "npu",
    ("npu",),
    priority=10,
    available=kernel_of_training_devices,
    contract=(Dtype("query", NPU_FLOATING),),
)
@at_ends
def _npu(query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **given: Any) -> Result:
    options = options_of(head_num, input_layout, **given)
    inputs = prepare(query, key, value, options)
    reason = kernel_refusal(inputs, options)
    if reason:
        warn_of(reason)
        return cast(Result, _blocks(query, key, value, head_num, input_layout, **given))
    result = npu_attention(query, key, value, options, inputs, kernel_switches(given))
    return cast(Result, result)
