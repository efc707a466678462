"""`npu_mm_all_reduce_add_rms_norm` that writes the sum into the residual; without gradients."""

from __future__ import annotations

from torch import Tensor

from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import (
    CONTRACT,
    Group,
    npu_mm_all_reduce_add_rms_norm,
)
from mindspeed_kernels.ops.operator import Operator


def npu_mm_all_reduce_add_rms_norm__reference(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str = "sum",
    epsilon: float = 1e-6,
    bias: Tensor | None = None,
    antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None,
    dequant_scale: Tensor | None = None,
    antiquant_group_size: int = 0,
    comm_turn: int = 0,
) -> tuple[Tensor, Tensor]:
    """`npu_mm_all_reduce_add_rms_norm`, with ``residual`` changed to the sum ``y``.

    Returns:
        ``residual`` itself and the norm ``[b, s, n]``.
    """
    total, norm = npu_mm_all_reduce_add_rms_norm(
        x1,
        x2,
        residual,
        gamma,
        hcom,
        reduce_op,
        epsilon,
        bias,
        antiquant_scale,
        antiquant_offset,
        dequant_scale,
        antiquant_group_size,
        comm_turn,
    )
    return residual.copy_(total), norm


npu_mm_all_reduce_add_rms_norm_ = Operator(
    "npu_mm_all_reduce_add_rms_norm_",
    npu_mm_all_reduce_add_rms_norm__reference,
    contract=CONTRACT,
    differentiable=False,
)
