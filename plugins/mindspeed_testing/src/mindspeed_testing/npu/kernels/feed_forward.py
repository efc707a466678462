"""``npu_ffn``: two products with an activation between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.repositories import op_plugin, ops_transformer
from mindspeed_testing.npu.kernels.rules import HALF

_PLAIN: dict[str, Any] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "fastgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "silu": F.silu,
}
_GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}
_QUANTIZED = ("scale", "offset", "deq_scale1", "deq_scale2")
_WIDENED = ("antiquant_scale1", "antiquant_scale2", "antiquant_offset1", "antiquant_offset2")


def _floating(a: Arguments) -> bool:
    return a["x"].dtype in HALF and a["weight1"].dtype == a["weight2"].dtype == a["x"].dtype


def _dtypes_match(a: Arguments) -> bool:
    if a["x"].dtype == torch.int8:
        return a["weight1"].dtype == a["weight2"].dtype == torch.int8
    return _floating(a) or (a["x"].dtype in HALF and a["weight1"].dtype == a["weight2"].dtype == torch.int8)


def _options_match(a: Arguments) -> bool:
    quantized = [name for name in _QUANTIZED if a[name] is not None]
    widened = [name for name in _WIDENED if a[name] is not None]
    if a["x"].dtype == torch.int8:
        return len(quantized) == len(_QUANTIZED) and not widened
    return not quantized and bool(widened) != _floating(a)


def _counts(a: Arguments) -> Sequence[int] | None:
    index, counts = a["expert_tokens_index"], a["expert_tokens"]
    if index is not None:
        return [high - low for low, high in zip([0, *index], index)]
    given: Sequence[int] | None = counts
    return given


def _experts_match(a: Arguments) -> bool:
    counts = _counts(a)
    if counts is None:
        return a["weight1"].dim() == a["weight2"].dim() == 2
    rows = a["x"].numel() // a["x"].shape[-1]
    return a["weight1"].dim() == 3 and len(counts) == a["weight1"].shape[0] <= 256 and sum(counts) == rows


def _sizes_match(a: Arguments) -> bool:
    (k1, n1), (k2, n2) = a["weight1"].shape[-2:], a["weight2"].shape[-2:]
    halves = 2 if a["activation"] in _GATED else 1
    return k1 == n2 == a["x"].shape[-1] and n1 == halves * k2 and max(k1, k2) < 1 << 16


def _precision_matches(a: Arguments) -> bool:
    precise = a["inner_precise"] or 0
    if a["activation"] in _GATED:
        return _floating(a) and a["x"].dtype == torch.float16 and precise == 1 and _counts(a) is None
    return precise in (0, 1) and not (a["x"].dtype == torch.bfloat16 and _floating(a) and precise)


def _biases_match(a: Arguments) -> bool:
    wanted = {torch.float16: torch.float16, torch.bfloat16: torch.float32, torch.int8: torch.int32}
    return all(a[name] is None or a[name].dtype == wanted[a["x"].dtype] for name in ("bias1", "bias2"))


def _offset_matches(a: Arguments) -> bool:
    counts, offset = _counts(a), a["offset"]
    return offset is None or tuple(offset.shape) == (1 if counts is None else len(counts),)


def _of(table: Tensor | None, expert: int | None) -> Tensor | None:
    return table if table is None or expert is None else table[expert]


def feed_forward(a: Arguments) -> Tensor:
    """Return ``[..., n2]``."""
    x = a["x"].reshape(-1, a["x"].shape[-1])
    dtype = a["output_dtype"] or torch.float16 if x.dtype == torch.int8 else x.dtype
    result = unwritten((x.shape[0], a["weight2"].shape[-1]), dtype)
    begin = 0
    for expert, count in enumerate(_counts(a) or [x.shape[0]]):
        rows = slice(begin, begin + count)
        result[rows] = _of_expert(a, x[rows], None if _counts(a) is None else expert).to(dtype)
        begin += count
    return result.view(*a["x"].shape[:-1], -1)


def _of_expert(a: Arguments, x: Tensor, expert: int | None) -> Tensor:
    hidden = _activated(a["activation"], _layer(a, x.double(), "1", expert))
    scale, offset = _of(a["scale"], expert), _of(a["offset"], expert)
    if scale is not None and offset is not None:
        hidden = (hidden * scale.double() + offset.double()).round().clamp(-128, 127)
    return _layer(a, hidden, "2", expert)


def _layer(a: Arguments, x: Tensor, number: str, expert: int | None) -> Tensor:
    weight, bias = _of(a[f"weight{number}"], expert), _of(a[f"bias{number}"], expert)
    assert weight is not None
    wide = weight.double()
    scale, offset = (_of(a[f"antiquant_{kind}{number}"], expert) for kind in ("scale", "offset"))
    if scale is not None:
        wide = (wide + (0.0 if offset is None else offset.double())) * scale.double()
    result = x @ wide
    result = result if bias is None else result + bias.double()
    dequant = _of(a[f"deq_scale{number}"], expert)
    if dequant is None:
        return result
    packed = dequant.dtype == torch.int64
    return result * (dequant.contiguous().view(torch.float32)[::2] if packed else dequant).double()


def _activated(name: str, x: Tensor) -> Tensor:
    if name not in _GATED:
        result: Tensor = _PLAIN[name](x)
        return result
    gate, value = x.chunk(2, -1)
    gated: Tensor = _PLAIN[_GATED[name]](gate) * value
    return gated


FEED_FORWARD = Kernel(
    "npu::npu_ffn",
    rules=(
        Rule("activation is gelu, fastgelu, relu, silu, geglu, swiglu or reglu",
             lambda a: a["activation"] in (*_PLAIN, *_GATED)),
        Rule("x float16 or bfloat16 with weights of its dtype or int8, or all int8", _dtypes_match),
        Rule("x has 2 to 8 dimensions and elements", lambda a: 2 <= a["x"].dim() <= 8 and a["x"].numel() > 0),
        Rule("experts: [E, k, n] weights, at most 256, whose tokens are all rows of x", _experts_match),
        Rule("k1 = n2 < 65536, and n1 = k2 < 65536, or twice k2 for gated activations", _sizes_match),
        Rule("quantized operands come with their own options, all of them", _options_match),
        Rule("gated activations: float16, no experts, inner_precise 1; bfloat16: inner_precise 0",
             _precision_matches),
        Rule("biases are float16 for float16, float32 for bfloat16, int32 for int8", _biases_match),
        Rule("offset has a number for each expert, and one without experts", _offset_matches),
    ),
    compute=feed_forward,
    sources=(
        ops_transformer("ffn/ffn/README.md"),
        ops_transformer("ffn/ffn/op_host/op_api/aclnn_ffn.cpp"),
        op_plugin("docs/zh/custom_APIs/torch_npu/torch_npu-npu_ffn.md"),
    ),
    unwritten="the whole result when x has no element",
    differs=("a bias for bfloat16 is float32", "expert_tokens are numbers, not a tensor"),
    socs=("910B", "910_93"),
)  # fmt: skip

KERNELS = (FEED_FORWARD,)
