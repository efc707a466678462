"""Softmax of scaled and masked scores, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import SOCS, Arguments, Kernel, Rule
from mindspeed_testing.npu.kernels.norms import (
    BF16,
    FP16,
    FP32,
    OP_PLUGIN,
    OPS_NN,
    dtypes,
    same,
    sources,
)

MASKED = -10000.0
"""The number that takes the place of a masked score, before the softmax."""


def _softmax(call: Arguments) -> Tensor:
    scores = (call["x"].double() * call["scale"]).masked_fill(call["mask"].bool(), MASKED)
    return scores.softmax(-1).to(call["x"].dtype)


def _softmax_backward(call: Arguments) -> Tensor:
    y, dy = call["y"].double(), call["y_grad"].double()
    inner = (dy - (dy * y).sum(-1, keepdim=True)) * y * call["scale"]
    return inner.masked_fill(call["mask"].bool(), 0.0).to(call["y_grad"].dtype)


def _rules(x: str) -> tuple[Rule, ...]:
    def fits(call: Arguments) -> bool:
        (b, n, q, k), mask = call[x].shape, call["mask"].shape
        return mask[2:] == (q, k) and mask[0] in (1, b) and mask[1] in (1, n)

    return (
        Rule(f"{x} and mask have four dimensions", lambda a: a[x].dim() == a["mask"].dim() == 4),
        Rule(f"the last dimension of {x} is between 1 and 4096", lambda a: 0 < a[x].shape[-1] <= 4096),
        Rule("mask is bool", lambda a: a["mask"].dtype == torch.bool),
        Rule(f"mask is [b or 1, n or 1, q, k] of {x}'s [b, n, q, k]", fits),
        Rule("fixed_triu_mask is off", lambda a: not a["fixed_triu_mask"]),
    )


_V2 = "vfusion/scaled_masked_softmax_v2/"
_GRAD = "vfusion/scaled_masked_softmax_grad_v2/"
_OLDER = "before 950 torch_npu asks for a kernel without V2, which is not published; it is held to the same"

KERNELS = (
    Kernel(
        "npu::npu_scaled_masked_softmax",
        (dtypes("x", same(BF16, FP16, FP32, count=1), SOCS), *_rules("x")),
        _softmax,
        (
            *sources(
                OPS_NN,
                _V2 + "op_host/scaled_masked_softmax_v2_tiling.cpp",
                _V2 + "op_kernel/scaled_masked_softmax_v2.h",
                _V2 + "docs/aclnnScaledMaskedSoftmax.md",
            ),
            *sources(OP_PLUGIN, "op_plugin/ops/opapi/ScaledMaskedSoftmaxKernelNpuOpApi.cpp"),
        ),
        differs=("masked scores are -10000: a row that is masked as a whole gets equal weights", _OLDER),
    ),
    Kernel(
        "npu::npu_scaled_masked_softmax_backward",
        (
            dtypes("y_grad y", same(BF16, FP16, FP32, count=2), SOCS),
            Rule("y has the shape of y_grad", lambda a: a["y"].shape == a["y_grad"].shape),
            Rule("y_grad has elements", lambda a: a["y_grad"].numel() > 0),
            *_rules("y_grad"),
        ),
        _softmax_backward,
        sources(
            OPS_NN,
            _GRAD + "op_host/scaled_masked_softmax_grad_v2_tiling.cpp",
            _GRAD + "docs/aclnnScaledMaskedSoftmaxBackward.md",
        ),
        differs=(_OLDER,),
    ),
)
