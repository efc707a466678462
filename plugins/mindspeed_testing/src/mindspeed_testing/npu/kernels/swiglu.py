"""SwiGLU, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel, Rule
from mindspeed_testing.npu.kernels.norms import (
    BF16,
    FP16,
    FP32,
    OP_PLUGIN,
    OPS_NN,
    WITH_BF16,
    dtypes,
    same,
    sources,
)


def _in_range(call: Arguments) -> bool:
    rank = call["input"].dim()
    return rank > 0 and -rank <= call["dim"] < rank


def _columns(call: Arguments) -> int:
    """Return the elements of the split dimension and all after it."""
    x = call["input"]
    return int(x.shape[call["dim"] % x.dim() :].numel())


def _aligned(call: Arguments) -> bool:
    return _columns(call) // 2 * call["input"].element_size() % 64 == 0


def _halves(call: Arguments) -> tuple[Tensor, Tensor]:
    gate, up = call["input"].double().chunk(2, call["dim"])
    return gate, up


def _swiglu(call: Arguments) -> Tensor:
    gate, up = _halves(call)
    return (gate / (1 + (-gate).exp()) * up).to(call["input"].dtype)


def _swiglu_backward(call: Arguments) -> Tensor:
    gate, up = _halves(call)
    dy, share = call["grad_output"].double(), 1 / (1 + (-gate).exp())
    slope = share * (1 + gate * (1 - share))
    found = torch.cat([dy * up * slope, dy * gate * share], call["dim"])
    return found.to(call["input"].dtype)


_SHAPE = (
    Rule("dim is one of input's dimensions", _in_range),
    Rule("the split dimension is even", lambda a: a["input"].shape[a["dim"]] % 2 == 0),
    Rule("a half of the split dimension and all after it is a multiple of 64 bytes", _aligned, ("310P",)),
)
_PATHS = ("activation/swi_glu/op_host/swi_glu_tiling.cpp", "activation/swi_glu/op_kernel/glu_tiling.hpp")

KERNELS = (
    Kernel(
        "npu::npu_swiglu",
        (
            dtypes("input", same(BF16, FP16, FP32, count=1), WITH_BF16),
            dtypes("input", same(FP16, FP32, count=1), ("310P",)),
            *_SHAPE,
            Rule("input has elements", lambda a: a["input"].numel() > 0, ("310P",)),
        ),
        _swiglu,
        (
            *sources(
                OPS_NN,
                "activation/swi_glu/op_host/swi_glu_def.cpp",
                "activation/swi_glu/docs/aclnnSwiGlu.md",
                *_PATHS,
            ),
            *sources(OP_PLUGIN, "op_plugin/config/op_plugin_functions.yaml"),
        ),
        differs=("the first half is the gate",),
    ),
    Kernel(
        "npu::npu_swiglu_backward",
        (
            dtypes("grad_output input", same(BF16, FP16, FP32, count=2), WITH_BF16),
            dtypes("grad_output input", same(FP16, FP32, count=2), ("310P",)),
            *_SHAPE,
            Rule("input has elements", lambda a: a["input"].numel() > 0),
        ),
        _swiglu_backward,
        sources(
            OPS_NN,
            "activation/swi_glu_grad/op_host/swi_glu_grad_def.cpp",
            "activation/swi_glu_grad/docs/aclnnSwiGluGrad.md",
            *_PATHS,
        ),
    ),
)
