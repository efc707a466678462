"""Liger-Kernel (extra ``cuda``) as a backend of operators; the contract stays ours.

Its functions are called so that statistics are float32 and neither inputs nor saved tensors are overwritten,
which is what they do by default. Its rotation is no backend: it overwrites what it is given, gradients too,
and takes the second half of the angles for the first. Nor is its cross entropy of logits: it overwrites them
with their gradient, and reads past them for a target that is not in the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.contract import NotEmpty, Size
from mindspeed_kernels.ops.availability import package_missing
from mindspeed_kernels.ops.rms_norm import rms_norm, rms_norm_reference
from mindspeed_kernels.ops.swiglu import swiglu, swiglu_along_last, swiglu_reference
from mindspeed_kernels.ops.triton_kernels import only_floating, rows_of, triton_missing

NAME = "liger"
_PRIORITY = -10
"""Behind torch's kernels and our own; see `mindspeed_kernels.ops.rms_norm` for what was measured."""
_WIDEST = 65536
"""The widest row that its kernels hold."""


def liger_missing() -> str:
    """Return why Liger-Kernel cannot be used; empty when it can."""
    return triton_missing() or package_missing("liger_kernel")


@rms_norm.backend(
    NAME,
    ("cuda",),
    priority=_PRIORITY,
    available=liger_missing,
    supports=only_floating("x", "gamma"),
    contract=(Size("x", -1, 1, _WIDEST), NotEmpty("x")),
)
def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6, zero_centered: bool = False) -> Tensor:
    if torch.compiler.is_compiling():
        return rms_norm_reference(x, gamma, epsilon, zero_centered)
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    offset = 1.0 if zero_centered else 0.0
    # The mode "gemma" computes everything in float32.
    found: Tensor = LigerRMSNormFunction.apply(rows_of(x), gamma, epsilon, offset, "gemma", False)
    return found.view(x.shape)


@swiglu.backend(
    NAME,
    ("cuda",),
    priority=_PRIORITY,
    available=liger_missing,
    supports=only_floating("x"),
    contract=(NotEmpty("x"),),
)
def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Activate; the activation is rounded before the product, too."""
    if torch.compiler.is_compiling():
        return swiglu_reference(x, dim)
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def activate(tensor: Tensor) -> Tensor:
        found: Tensor = LigerFusedGateUpSiLUMulFunction.apply(rows_of(tensor), False)
        return found.view(*tensor.shape[:-1], found.shape[-1])

    return swiglu_along_last(activate, x, dim)
