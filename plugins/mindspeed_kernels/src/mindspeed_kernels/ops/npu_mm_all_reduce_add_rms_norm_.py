"""`npu_mm_all_reduce_add_rms_norm` that writes the sum into the residual; without gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import CONTRACT, npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.signatures import with_signature_of


@with_signature_of(npu_mm_all_reduce_add_rms_norm.reference)
def npu_mm_all_reduce_add_rms_norm__reference(*, residual: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """Compute `npu_mm_all_reduce_add_rms_norm`, with ``residual`` changed to the sum ``y``.

    Returns:
        ``residual`` itself and the norm ``[b, s, n]``.
    """
    total, norm = npu_mm_all_reduce_add_rms_norm(residual=residual, **others)
    return residual.copy_(total), norm


npu_mm_all_reduce_add_rms_norm_ = Operator(
    "npu_mm_all_reduce_add_rms_norm_",
    npu_mm_all_reduce_add_rms_norm__reference,
    contract=CONTRACT,
    differentiable=False,
)
