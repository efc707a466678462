"""Memory formats: tensors of the value device keep the plain one, of which every other is a copy."""

from __future__ import annotations

from torch import Tensor

from mindspeed_testing.npu.kernels.contract import Arguments, Kernel
from mindspeed_testing.npu.kernels.norms import sources

_PYTORCH = ("pytorch", "9e73e708", "2026-11-22")


def _cast(call: Arguments) -> Tensor:
    return call["input"].clone()


KERNELS = (
    Kernel(
        "npu::npu_format_cast",
        (),
        _cast,
        sources(_PYTORCH, "torch_npu/csrc/aten/common/FormatCastKernelNpu.cpp"),
        differs=("shape and values stay, also where the format pads",),
    ),
)
