"""MX formats: float8 with an exponent for every 32 numbers, which lies in pairs for 64.

An exponent is a byte ``e`` that stands for ``2**(e - 127)``, 255 for NaN. Along the dimension that shares
them, exponents are padded with zeros to pairs; the pair is a last dimension of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.repositories import op_plugin, ops_nn
from mindspeed_testing.npu.kernels.rules import HALF

BLOCK, PAIR = 32, 64
FLOAT8 = {torch.float8_e4m3fn: (8, 448.0), torch.float8_e5m2: (15, 57344.0)}
"""Exponent of the largest number of each format, and that number."""
E8M0 = 293
"""torch_npu's number of the dtype of shared exponents."""
_NUMBERS = {23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 291: torch.float8_e5m2, 292: torch.float8_e4m3fn}
_NAN = 255


def _float8(a: Arguments) -> torch.dtype | None:
    given = a["dst_type"]
    return given if isinstance(given, torch.dtype) else _NUMBERS.get(given)


def quantized(block: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return float8 ``[n, ...]`` and the bytes ``[...]`` of the exponents that up to 32 numbers share."""
    most, largest = FLOAT8[dtype]
    # The bits between sign and mantissa; numbers below normal ones have none.
    bits = (block.float().abs().contiguous().view(torch.int32) >> 23).amax(0)
    byte = (bits - most).clamp(min=0)
    inverse = torch.where(byte > 0, 2.0 ** (127 - byte.double()), 0.0)
    scaled = torch.where(bits == _NAN, float("nan"), block.double() * inverse)
    values = scaled.clamp(-largest, largest).float().to(dtype)
    return values, torch.where(bits == _NAN, _NAN, byte).to(torch.uint8)


def widened(values: Tensor, exponents: Tensor) -> Tensor:
    """Return float8 numbers times powers of two, in float64; the byte 255 is NaN."""
    powers = torch.where(exponents == _NAN, float("nan"), 2.0 ** (exponents.double() - 127))
    return values.double() * powers


def exponents_of(scale: Tensor, length: int, first: int = 0) -> Tensor:
    """Return the exponents ``[length, ...]`` of numbers from pairs ``[p, ..., 2]`` that begin at a pair."""
    place = torch.arange(length)
    return scale[first + place // PAIR, ..., place % PAIR // BLOCK]


def _into(x: Tensor, y: Tensor, scale: Tensor, first: int, dtype: torch.dtype) -> None:
    """Quantize ``[n, ...]`` along its first dimension into ``y`` and pairs of ``scale``."""
    scale[first : first - (-x.shape[0] // PAIR)] = 0
    for start in range(0, x.shape[0], BLOCK):
        values, byte = quantized(x[start : start + BLOCK], dtype)
        y[start : start + BLOCK] = values
        scale[first + start // PAIR, ..., start % PAIR // BLOCK] = byte


def dynamic_mx_quant(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return float8 in the shape of ``input``, and exponents with pairs behind one another along the axis."""
    x, dtype = a["input"].movedim(a["axis"], 0), _float8(a)
    assert dtype is not None
    y = unwritten(x.shape, dtype)
    scale = unwritten((-(-x.shape[0] // PAIR), *x.shape[1:], 2), torch.uint8)
    _into(x, y, scale, 0, dtype)
    axis = a["axis"] % x.dim()
    # Cloned, because strides tell a transposed operand, and those of one element are not open here.
    y, scale = (one.movedim(0, axis).clone(memory_format=torch.contiguous_format) for one in (y, scale))
    return y, scale


def grouped_dynamic_mx_quant(a: Arguments) -> tuple[Tensor, Tensor]:
    """Return float8 ``[m, n]`` and exponents ``[m / 64 + g, n, 2]``; blocks begin anew with every group."""
    x, dtype, ends = a["x"], _float8(a), a["group_index"].tolist()
    assert dtype is not None
    y = unwritten(x.shape, dtype)
    scale = unwritten((x.shape[0] // PAIR + len(ends), x.shape[1], 2), torch.uint8)
    begin = 0
    for group, end in enumerate(ends):
        _into(x[begin:end], y[begin:end], scale, begin // PAIR + group, dtype)
        begin = end
    return y, scale


def _ascends(a: Arguments) -> bool:
    ends = a["group_index"].tolist()
    return all(low <= high for low, high in zip([0, *ends], ends)) and ends[-1:] == [a["x"].shape[0]]


_FORM = Rule("dst_type is E4M3 or E5M2 of float8, round_mode rint", lambda a: bool(_float8(a)) and (
    a["round_mode"] == "rint"))  # fmt: skip
_SCALE = Rule(
    "scale_alg 0, dst_type_max 0: the contract of others is not written",
    lambda a: not a["scale_alg"] and not a["dst_type_max"] and not a.get("max_low_bound"),
)
_DIFFERS = (
    "above the format's largest number is that number; a block with an infinite number or NaN is NaN",
    "a block whose exponent would be 0 or less gets exponent 0 and zeros",
)
DYNAMIC_MX_QUANT = Kernel(
    "npu::npu_dynamic_mx_quant",
    rules=(
        Rule(
            "input has 1 to 7 dimensions of float16, bfloat16, or float32 with 32 numbers along the axis",
            lambda a: 1 <= a["input"].dim() <= 7
            and (a["input"].dtype in HALF
                 or (a["input"].dtype == torch.float32 and a["input"].shape[a["axis"]] >= BLOCK)),
        ),
        Rule("input has elements: what the device does without any is not published",
             lambda a: a["input"].numel() > 0),
        _FORM,
        Rule("block_size is 32: the contract of others is not written", lambda a: a["block_size"] == BLOCK),
        _SCALE,
    ),
    compute=dynamic_mx_quant,
    sources=(
        ops_nn("quant/dynamic_mx_quant/op_host/arch35/dynamic_mx_quant_tiling_arch35.cpp"),
        ops_nn("quant/dynamic_mx_quant/op_kernel/arch35/dynamic_mx_quant_tail_axis_fp8.h"),
        ops_nn("quant/dynamic_mx_quant/docs/aclnnDynamicMxQuant.md"),
        op_plugin("op_plugin/ops/opapi/DynamicMxQuantKernelNpuOpApi.cpp"),
    ),
    differs=(*_DIFFERS, "exponents are bytes in pairs, [..., n / 64, ..., 2], the last one 0 where it has no "
             "block"),
    socs=("950",),
)  # fmt: skip
GROUPED_DYNAMIC_MX_QUANT = Kernel(
    "npu::npu_grouped_dynamic_mx_quant",
    rules=(
        Rule("x [m, n] float16 or bfloat16", lambda a: a["x"].dim() == 2 and a["x"].dtype in HALF),
        Rule("group_index is int32 [g], at least one",
             lambda a: a["group_index"].dtype == torch.int32 and a["group_index"].dim() == 1
             and a["group_index"].numel() > 0),
        Rule("group_index ascends from 0 to the rows there are (not checked by the device)", _ascends,
             of_values=True),
        _FORM,
        Rule("blocksize is 32", lambda a: a["blocksize"] == BLOCK),
        _SCALE,
    ),
    compute=grouped_dynamic_mx_quant,
    sources=(
        ops_nn("quant/grouped_dynamic_mx_quant/op_api/aclnn_grouped_dynamic_mx_quant.cpp"),
        ops_nn("quant/grouped_dynamic_mx_quant/op_kernel/arch35/grouped_dynamic_mx_quant_combine.h"),
        ops_nn("quant/grouped_dynamic_mx_quant/docs/aclnnGroupedDynamicMxQuant.md"),
        op_plugin("op_plugin/ops/opapi/GroupedDynamicMxQuantKernelNpuOpApi.cpp"),
    ),
    unwritten="exponents of pairs that no group fills; without rows both results, and nothing is launched",
    differs=(*_DIFFERS, "pairs of a group that begins at row s and is the g-th are from s / 64 + g on"),
    socs=("950",),
)  # fmt: skip

KERNELS = (DYNAMIC_MX_QUANT, GROUPED_DYNAMIC_MX_QUANT)
