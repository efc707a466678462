"""The join of two attentions over other keys: ``npu_ring_attention_update``."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.attention_call import LANES
from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, Source

_STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")
_OUTPUTS = ("prev_attn_out", "cur_attn_out")
_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_BEFORE_950 = ("910B", "910_93")


def _packed(a: Arguments) -> bool:
    return bool(a["input_layout"] == "TND")


def _shapes(a: Arguments) -> bool:
    output, number = a["prev_attn_out"].shape, a["prev_softmax_max"].shape
    if _packed(a):
        return len(number) == 3 and tuple(number) == (output[0], output[1], LANES)
    fits = len(number) == 4 and (number[0], number[2], number[3]) == (output[1], output[0], LANES)
    return bool(fits and number[1] and output[2] % number[1] == 0)


def _ends(a: Arguments) -> bool:
    if not _packed(a):
        return True
    ends = a["actual_seq_qlen"]
    return ends is not None and ends.dtype == torch.int64 and ends.dim() == 1 and ends.numel() > 1


def _ends_cover(a: Arguments) -> bool:
    if not _packed(a):
        return True
    ends = a["actual_seq_qlen"]
    grows = bool((ends.diff() >= 0).all())
    return grows and int(ends[0]) == 0 and int(ends[-1]) == a["prev_attn_out"].shape[0]


def _width(a: Arguments) -> bool:
    output = a["prev_attn_out"]
    return not _packed(a) or (output.shape[2] % 64 == 0 and output.shape[2] <= 768 and output.shape[1] <= 256)


def _lanes(a: Arguments) -> bool:
    return all(torch.equal(a[name], a[name][..., :1].expand_as(a[name])) for name in _STATISTICS)


RULES = (
    Rule("input_layout is SBH or TND", lambda a: a["input_layout"] in ("SBH", "TND")),
    Rule(
        "input_softmax_layout is empty, SBH or TND", lambda a: a["input_softmax_layout"] in ("", "SBH", "TND")
    ),
    Rule("outputs have 3 dimensions", lambda a: all(a[name].dim() == 3 for name in _OUTPUTS)),
    Rule("outputs have one shape", lambda a: len({a[name].shape for name in _OUTPUTS}) == 1),
    Rule(
        "outputs are float16, bfloat16 or float32, both alike",
        lambda a: len({a[n].dtype for n in _OUTPUTS}) == 1 and a["prev_attn_out"].dtype in _FLOATING,
    ),
    Rule("statistics are float32", lambda a: all(a[name].dtype == torch.float32 for name in _STATISTICS)),
    Rule("statistics have one shape", lambda a: len({a[name].shape for name in _STATISTICS}) == 1),
    Rule("statistics are [b, n, s, 8], TND [t, n, 8]", _shapes),
    Rule("nothing is empty", lambda a: all(a[name].numel() for name in (*_OUTPUTS, *_STATISTICS))),
    Rule("TND needs actual_seq_qlen, int64 with two or more numbers", _ends),
    Rule("actual_seq_qlen of TND ascends from 0 to t", _ends_cover, of_values=True),
    Rule("TND needs heads 64 wide or a multiple, at most 768, and at most 256 heads", _width, _BEFORE_950),
    Rule("each row's number stands in all 8 lanes", _lanes, of_values=True),
)


def _update(a: Arguments) -> Any:
    layout = "TND" if a["input_softmax_layout"] == "TND" else ""
    numbers = [_rows(a, name, layout) for name in _STATISTICS]
    highest = torch.maximum(numbers[0], numbers[2])
    before, now = numbers[1] * (numbers[0] - highest).exp(), numbers[3] * (numbers[2] - highest).exp()
    # Float32, as on the device: the sums of rows that saw nothing in both overflow.
    total = (before + now).float().double()
    shares = [(part / total).unsqueeze(-1) for part in (before, now)]
    output = a["prev_attn_out"]
    shape = output.shape if _packed(a) else (*output.shape[:2], a["prev_softmax_max"].shape[1], -1)
    parts = [a[name].double().reshape(shape) * share for name, share in zip(_OUTPUTS, shares)]
    joined = (parts[0] + parts[1]).reshape(output.shape).to(output.dtype)
    return joined, _written(a, highest, layout), _written(a, total, layout)


def _rows(a: Arguments, name: str, layout: str) -> Tensor:
    """Return statistics as ``[s, b, n]``, packed ``[t, n]``."""
    number: Tensor = a[name][..., 0].double()
    if not _packed(a):
        return number.permute(2, 0, 1)
    if layout == "TND":
        return number
    heads, flat = number.shape[1], number.flatten()
    ends = a["actual_seq_qlen"].tolist()
    parts = [flat[first * heads : last * heads].view(heads, last - first).T for first, last in pairwise(ends)]
    return torch.cat(parts)


def _written(a: Arguments, number: Tensor, layout: str) -> Tensor:
    if not _packed(a):
        number = number.permute(1, 2, 0)
    elif layout != "TND":
        ends = a["actual_seq_qlen"].tolist()
        flat = [number[first:last].T.reshape(-1) for first, last in pairwise(ends)]
        number = torch.cat(flat).view(number.shape)
    return number.float().unsqueeze(-1).expand(*number.shape, LANES).contiguous()


_COMMIT, _READ = "5778144076def6311557939ab5cbfe8303f13e8f", "2026-11-22"
_FOLDER = "attention/ring_attention_update"

KERNELS = (
    Kernel(
        "npu::npu_ring_attention_update",
        RULES,
        _update,
        (
            *(
                Source("ops-transformer", f"{_FOLDER}/{path}", _COMMIT, _READ)
                for path in (
                    "op_host/ring_attention_update_tiling.cpp",
                    "op_kernel/ring_attention_update_kernel.h",
                    "docs/aclnnRingAttentionUpdateV2.md",
                )
            ),
            Source(
                "op-plugin",
                "op_plugin/ops/opapi/RingAttentionUpdateKernelNpuOpApi.cpp",
                "517f2e7d0f202f38b76310706cb977ca2388ad21",
                _READ,
            ),
        ),
        differs=(
            "a row that saw nothing in either block is not a number",
            "statistics of TND are taken for [n, s, 8] of each sequence unless input_softmax_layout is TND",
        ),
        socs=("910B", "910_93", "950"),
    ),
)
