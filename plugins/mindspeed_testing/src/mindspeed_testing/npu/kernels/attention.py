"""Fused attention and its gradients: ``npu_fusion_attention`` and its second version.

Scores that a mask hides are the lowest float32, not minus infinity. So a row that sees nothing is the average
of all values, unless the kernel zeroes such rows; then its maximum is the lowest float32 and its sum the
largest one. Statistics of packed sequences lie sequence by sequence, each ``[n, s, 8]``, in memory that
claims to be ``[t, n, 8]``, unless ``softmax_layout`` says TND.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.attention_call import (
    LANES,
    LARGEST,
    LOWEST,
    AttentionCall,
    Sequence,
    drawn_bits,
)
from mindspeed_testing.npu.kernels.attention_rules import BACKWARD, BEFORE_950, FORWARD
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Source, unwritten

_OPS, _PLUGIN = "5778144076def6311557939ab5cbfe8303f13e8f", "517f2e7d0f202f38b76310706cb977ca2388ad21"
_READ = "2026-11-22"
_SOCS = ("910B", "910_93", "950")


def _forward(arguments: Arguments) -> Any:
    c = AttentionCall(arguments)
    query = arguments["query"]
    q, k, v = _heads(c)
    seed, offset, bits = _drawn(c)
    sink = arguments["sink"]
    if sink is not None and c.soc == "950" and not c.second:
        sink = None
    context = unwritten((*q.shape[:3], v.shape[3]), torch.float64)
    highest, total = (unwritten(q.shape[:3], torch.float64) for _ in range(2))
    for item in c.sequences:
        place = (item.sample, slice(None), slice(*item.rows))
        context[place], highest[place], total[place] = _attend(c, item, (q, k, v), sink, bits)
    statistics = (_laid_out(c, number, _layout_of_statistics(c)) for number in (highest, total))
    count = c.numels
    if arguments["dropout_mask"] is not None and not c.packed:
        count = torch.iinfo(torch.int64).max
    return (c.in_layout(context, query.dtype), *statistics, query.new_empty(0), seed, offset, count)


def _heads(c: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values ``[b, n, s, d]``, the last two repeated to as many heads."""
    share = c.heads // c.groups
    keys, values = (c.of_heads(name, c.groups).repeat_interleave(share, 1) for name in ("key", "value"))
    return c.of_heads("query", c.heads), keys, values


def _drawn(c: AttentionCall) -> tuple[int, int, Tensor | None]:
    """Return seed, offset and mask of the dropped weights of forward."""
    given: Tensor | None = c.a["dropout_mask"]
    seed, offset = c.a["seed"], c.a["offset"]
    if given is not None:
        return seed, offset, given if c.keep < 1.0 else None
    if c.keep >= 1.0:
        return seed, offset, None
    if not (c.second and c.soc == "950"):
        seed, offset = int(torch.randint(1 << 31, ())), 0
    return seed, offset, drawn_bits(seed, offset, c.numels, c.keep)


def _masked(c: AttentionCall, item: Sequence, q: Tensor, k: Tensor) -> Tensor:
    """Return the scores ``[n, s1, s2]`` of a sequence, the lowest float32 where they are hidden."""
    rows, columns = slice(*item.rows), slice(*item.columns)
    scores = c.biased(q[item.sample, :, rows] @ k[item.sample, :, columns].transpose(-1, -2), item)
    seen = c.visible(item)
    return scores if seen is None else scores.masked_fill(~seen, LOWEST)


def _attend(
    c: AttentionCall,
    item: Sequence,
    heads: tuple[Tensor, Tensor, Tensor],
    sink: Tensor | None,
    bits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = heads
    if not item.s2:
        # Nothing is launched but a fill with zeros, statistics included.
        empty = torch.zeros(c.heads, item.s1, dtype=torch.float64)
        return torch.zeros(c.heads, item.s1, v.shape[3], dtype=torch.float64), empty, empty
    scores = _masked(c, item, q, k)
    highest = scores.amax(-1)
    if sink is not None:
        highest = torch.maximum(highest, sink.double().view(-1, 1))
    weights = (scores - highest.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    if sink is not None:
        total = total + (sink.double().view(-1, 1) - highest).exp()
    if c.zero_rows(item):
        nothing = highest == LOWEST
        weights = weights.masked_fill(nothing.unsqueeze(-1), 0.0)
        total = total.masked_fill(nothing, LARGEST)
    weights = weights / total.unsqueeze(-1) * c.kept(item, bits)
    return weights @ v[item.sample, :, slice(*item.columns)], highest, total


def _layout_of_statistics(c: AttentionCall) -> str:
    """Return ``TND`` or empty: the second version does not hand the wish on without a sink before 950."""
    ignored = c.second and c.a["sink"] is None and c.soc in BEFORE_950
    return "" if ignored else str(c.a["softmax_layout"])


def _laid_out(c: AttentionCall, number: Tensor, layout: str) -> Tensor:
    """Return ``[b, n, s]`` as the kernel writes it, eight times each."""
    wide = number.float().unsqueeze(-1).expand(*number.shape, LANES)
    if not c.packed:
        return wide.contiguous()
    if layout == "TND":
        return wide[0].transpose(0, 1).contiguous()
    flat = unwritten((number.shape[2] * c.heads, LANES), torch.float32)
    for item in c.sequences:
        first = item.rows[0] * c.heads
        flat[first : first + item.s1 * c.heads] = wide[0, :, slice(*item.rows)].reshape(-1, LANES)
    return flat.view(number.shape[2], c.heads, LANES)


def _read(c: AttentionCall, name: str) -> Tensor:
    """Return statistics as ``[b, n, s]``, read in the layout that the kernel takes them for."""
    number = c.a[name][..., 0].double()
    if not c.packed:
        return number
    if _layout_of_statistics(c) == "TND":
        return number.transpose(0, 1).unsqueeze(0)
    flat, result = number.flatten(), unwritten((1, c.heads, number.shape[0]), torch.float64)
    for item in c.sequences:
        first = item.rows[0] * c.heads
        result[0, :, slice(*item.rows)] = flat[first : first + item.s1 * c.heads].view(c.heads, item.s1)
    return result


def _backward(arguments: Arguments) -> Any:
    c = AttentionCall(arguments)
    q, k, v = _heads(c)
    outer, context = (c.of_heads(name, c.heads) for name in ("dy", "attention_in"))
    highest, total = _read(c, "softmax_max"), _read(c, "softmax_sum")
    bits = None
    if c.keep < 1.0:
        bits = drawn_bits(arguments["seed"], arguments["offset"], arguments["numels"], c.keep)
    to_query, to_key, to_value = (unwritten(tensor.shape, torch.float64) for tensor in (q, k, v))
    delta = (outer * context).sum(-1)
    sink = arguments["sink"]
    to_sink = torch.zeros(c.heads, dtype=torch.float64)
    for item in c.sequences:
        rows = (item.sample, slice(None), slice(*item.rows))
        columns = (item.sample, slice(None), slice(*item.columns))
        divisor = total[rows].unsqueeze(-1)
        weights = (_masked(c, item, q, k) - highest[rows].unsqueeze(-1)).exp() / divisor
        kept = c.kept(item, bits)
        to_value[columns] = (weights * kept).transpose(-1, -2) @ outer[rows]
        inner = weights * ((outer[rows] @ v[columns].transpose(-1, -2)) * kept - delta[rows].unsqueeze(-1))
        to_query[rows] = inner @ k[columns] * c.scale
        to_key[columns] = inner.transpose(-1, -2) @ q[rows] * c.scale
        if sink is not None:
            share = (sink.double().view(-1, 1) - highest[rows]).exp() / total[rows]
            to_sink -= (share * delta[rows]).sum(-1)
    dtype, share = arguments["query"].dtype, c.heads // c.groups
    grouped = (tensor.unflatten(1, (c.groups, share)).sum(2) for tensor in (to_key, to_value))
    found = [c.in_layout(tensor, dtype) for tensor in (to_query, *grouped)]
    pse = arguments["pse"]
    to_pse = None if pse is None else unwritten(pse.shape, pse.dtype)
    to_sink = to_sink.float() if sink is not None else to_sink.new_empty(0, dtype=torch.float32)
    return (*found, to_pse, None, None, to_sink) if c.second else (*found, to_pse, to_sink)


def _sources(*paths: str) -> tuple[Source, ...]:
    return tuple(
        Source(*("op-plugin", path, _PLUGIN, _READ))
        if path.startswith(("op_plugin", "docs"))
        else Source(*("ops-transformer", path, _OPS, _READ))
        for path in paths
    )


_SCORE, _GRAD = "attention/flash_attention_score", "attention/flash_attention_score_grad"
_BINDINGS = (
    "op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp",
    "op_plugin/ops/opapi/FlashAttentionV2KernelNpuOpApi.cpp",
)
_FORWARD_SOURCES = (
    f"{_SCORE}/op_api/aclnn_flash_attention_score.cpp",
    f"{_SCORE}/op_host/arch22/flash_attention_score_tiling_general.cpp",
    f"{_SCORE}/op_kernel/arch22/flash_attention_score_s1s2_bn2gs1.h",
    f"{_SCORE}/docs/aclnnFlashAttentionVarLenScoreV5.md",
    "docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md",
)
_BACKWARD_SOURCES = (
    f"{_GRAD}/op_api/aclnn_flash_attention_score_grad.cpp",
    f"{_GRAD}/op_host/arch22/flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp",
    f"{_GRAD}/op_host/arch22/flash_attention_score_grad_tiling_common.cpp",
    f"{_GRAD}/docs/aclnnFlashAttentionScoreGradV3.md",
)
_FORWARD_DIFFERS = (
    "a row that sees nothing is the average of all values, or with inner_precise=2 and where the limits of a "
    "band show it, zero with the lowest float32 as maximum and the largest as sum",
    "dropout_mask is packed, eight weights a byte; its seed and offset must be given too, because backward "
    "draws the mask again and never takes it",
    "seed and offset are replaced by those of the device's generator where keep_prob is below 1",
    "statistics of TND lie [n, s, 8] for each sequence unless softmax_layout is TND",
    "hidden scores are the lowest float32, so limits without a mask hide nothing",
)

KERNELS = (
    Kernel(
        "npu::npu_fusion_attention",
        FORWARD,
        _forward,
        _sources(_BINDINGS[0], *_FORWARD_SOURCES),
        "rows behind the last packed sequence; numels with a dropout_mask",
        (*_FORWARD_DIFFERS, "Ascend 950 takes a sink and ignores it"),
        _SOCS,
    ),
    Kernel(
        "npu::npu_fusion_attention_v2",
        FORWARD,
        _forward,
        _sources(_BINDINGS[1], *_FORWARD_SOURCES),
        "rows behind the last packed sequence; numels with a dropout_mask",
        (
            *_FORWARD_DIFFERS,
            "softmax_layout is ignored without a sink before Ascend 950",
            "on Ascend 950 the weights are dropped by the seed that is given, 0 by default, every time alike",
        ),
        _SOCS,
    ),
    Kernel(
        "npu::npu_fusion_attention_grad",
        BACKWARD,
        _backward,
        _sources(_BINDINGS[0], *_BACKWARD_SOURCES),
        "the gradient of pse, always; rows behind the last packed sequence",
        ("dropped weights are drawn again from seed, offset and numels",),
        _SOCS,
    ),
    Kernel(
        "npu::npu_fusion_attention_grad_v2",
        BACKWARD,
        _backward,
        _sources(_BINDINGS[1], *_BACKWARD_SOURCES),
        "the gradient of pse, always; rows behind the last packed sequence",
        (
            "dropped weights are drawn again from seed, offset and numels",
            "softmax_layout is ignored without a sink before Ascend 950",
        ),
        _SOCS,
    ),
)
