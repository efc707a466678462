"""Rotary position embedding of one tensor, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule, unwritten
from mindspeed_testing.npu.kernels.norms import (
    BF16,
    FP16,
    FP32,
    OP_PLUGIN,
    WITH_BF16,
    dtypes,
    same,
    sources,
)

_OPS_TRANSFORMER = ("ops-transformer", "c29bc106", "2026-11-22")


def _rotated(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack([-second, first], -1).flatten(-2)


def _rotated_back(x: Tensor, mode: str) -> Tensor:
    """Apply the transpose of the rotation, which is its inverse."""
    return -_rotated(x, mode)


def _angles(call: Arguments) -> tuple[Tensor, Tensor]:
    # op-plugin rounds both to the dtype of the input first.
    dtype = call["input"].dtype
    return call["r1"].to(dtype).double(), call["r2"].to(dtype).double()


def _rotary(call: Arguments) -> Tensor:
    cos, sin = _angles(call)
    x = call["input"].double()
    return (x * cos + _rotated(x, call["rotary_mode"]) * sin).to(call["input"].dtype)


def _rotary_backward(call: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = _angles(call)
    x, mode, dtype = call["input"].double(), call["rotary_mode"], call["input"].dtype
    dy = call["grad"].to(dtype).double()
    dx = dy * cos + _rotated_back(dy * sin, mode)
    if call.requiring_grad.isdisjoint({"r1", "r2"}):
        return dx.to(dtype), unwritten(cos.shape, dtype), unwritten(sin.shape, dtype)
    dcos, dsin = (dy * x).sum_to_size(cos.shape), (dy * _rotated(x, mode)).sum_to_size(sin.shape)
    return dx.to(dtype), dcos.to(dtype), dsin.to(dtype)


def _four(call: Arguments) -> bool:
    return all(call[name].dim() == 4 for name in ("input", "r1", "r2"))


def _width(call: Arguments) -> bool:
    widths = {call[name].shape[-1] for name in ("input", "r1", "r2")}
    return len(widths) == 1 and widths.pop() % 2 == 0


def _layout(call: Arguments) -> bool:
    """Judge the first three dimensions of the angles, for BNSD, BSND and SBND."""
    (a, b, c), angles = call["input"].shape[:3], tuple(call["r1"].shape[:3])
    shared = {(1, 1, c), (1, b, 1), (a, 1, 1)}
    if call["rotary_mode"] == "interleave":
        return angles in shared
    return angles in {*shared, (a, 1, c), (a, b, 1), (a, b, c)}


def _sizes(call: Arguments) -> bool:
    """Judge batch and heads under the layout that the angles allow."""
    (a, b, c), angles = call["input"].shape[:3], tuple(call["r1"].shape[:3])
    readings = [
        pair
        for pair, fits in (
            ((a, b), angles[1] in (1, b) and angles[2] == c),
            ((a, c), angles[2] in (1, c) and angles[1] == b),
            ((b, c), angles[0] == a),
        )
        if fits
    ]
    if call["rotary_mode"] == "interleave":
        return any(batch * heads < 1000 for batch, heads in readings)
    return any(batch < 1000 and heads < 1000 for batch, heads in readings)


_BEFORE_950 = ("910B", "910_93")
_RULES = (
    Rule("rotary_mode is half or interleave", lambda a: a["rotary_mode"] in ("half", "interleave")),
    Rule("input, r1 and r2 have four dimensions", _four),
    Rule("r1 and r2 have one shape", lambda a: a["r1"].shape == a["r2"].shape),
    Rule("the last dimensions are equal and even", _width),
    Rule("the last dimension is below 896", lambda a: a["input"].shape[-1] < 896, _BEFORE_950),
    Rule(
        "r1 has the positions of input in the layout BNSD, BSND or SBND, one for all heads or each its own; "
        "with rotary_mode interleave one for the whole batch",
        _layout,
        _BEFORE_950,
    ),
    Rule("batch and heads are below 1000; with rotary_mode interleave their product", _sizes, _BEFORE_950),
)

KERNELS = (
    Kernel(
        "npu::npu_rotary_mul",
        (dtypes("input", same(BF16, FP16, FP32, count=1), WITH_BF16), *_RULES),
        _rotary,
        (
            *sources(
                _OPS_TRANSFORMER,
                "posembedding/rotary_position_embedding/docs/aclnnRotaryPositionEmbedding.md",
                "posembedding/rotary_position_embedding/op_host/rotary_position_embedding_def.cpp",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/RotaryMulKernelNpuOpApi.cpp"),
        ),
        differs=("r1 and r2 are rounded to the dtype of input", "on 310P another kernel runs, not published"),
        socs=WITH_BF16,
    ),
    Kernel(
        "npu::npu_rotary_mul_backward",
        (
            dtypes("input", same(BF16, FP16, FP32, count=1), WITH_BF16),
            *_RULES,
            Rule(
                "for the gradients of r1 and r2, batch times heads is at most 1024",
                lambda a: (
                    a.requiring_grad.isdisjoint({"r1", "r2"})
                    or a["input"].shape[0] * a["input"].shape[1] <= 1024
                ),
                _BEFORE_950,
            ),
        ),
        _rotary_backward,
        (
            *sources(
                _OPS_TRANSFORMER,
                "posembedding/rotary_position_embedding_grad/docs/aclnnRotaryPositionEmbeddingGrad.md",
                "posembedding/rotary_position_embedding_grad/op_host/rotary_position_embedding_grad_def.cpp",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/RotaryMulBackwardKernelNpuOpApi.cpp"),
        ),
        unwritten="the gradients of r1 and r2, where neither requires grad",
        socs=WITH_BF16,
    ),
)
