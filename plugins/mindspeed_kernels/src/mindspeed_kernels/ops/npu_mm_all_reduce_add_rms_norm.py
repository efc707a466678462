"""Matrix product, sum over ranks, residual addition and RMS norm: the end of a row-parallel sublayer.

Three kinds of operands: floating ones (differentiable), 8-bit ones (``dequant_scale``), and floating rows
with an 8-bit weight (``antiquant_scale``). The bias is added on every rank before the sum, so it counts once
per rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import HALF, Choice, Contract, Dtype, Range, Rank, SameDtype, SameSize
from mindspeed_kernels.ops import collectives
from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.overlapped_matmul import mc2_sums
from mindspeed_kernels.ops.process_groups import hccl_name, process_group
from mindspeed_kernels.ops.quantization import check_group_size, decoded_scale, exact_product, widened_weight
from mindspeed_kernels.ops.rms_norm import rms_norm, rms_norm_reference
from mindspeed_kernels.ops.signatures import with_signature_of

Group = ProcessGroup | str | None

CONTRACT: Contract = (
    Rank("x1", 2, 3),
    Rank("x2", 2, 2),
    Dtype("residual"),
    SameDtype(("residual", "gamma")),
    SameSize("x2", 0, "x1", -1),
    SameSize("residual", -1, "x2", 1),
    SameSize("gamma", 0, "x2", 1),
    SameSize("bias", 0, "x2", 1),
    Choice("reduce_op", ("sum",)),
    Choice("comm_turn", (0,)),
    Range("epsilon", 0.0, 1.0),
)
"""Rules of both forms, the one that returns and the one that writes into the residual."""


def _total(
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    hcom: Group,
    bias: Tensor | None,
    antiquant_scale: Tensor | None,
    antiquant_offset: Tensor | None,
    dequant_scale: Tensor | None,
    antiquant_group_size: int,
    **others: Any,
) -> Tensor:
    """Compute ``sum over ranks of (x1 · x2 + bias) + residual``, with integers widened."""
    if dequant_scale is not None:
        scaled = exact_product(x1, x2, bias) * decoded_scale(dequant_scale).double()
        product = scaled.to(residual.dtype)
    else:
        if antiquant_scale is not None:
            check_group_size("npu_mm_all_reduce_add_rms_norm", antiquant_group_size, x2.shape[0])
            x2 = widened_weight(x2, antiquant_scale, antiquant_offset, antiquant_group_size, x1.dtype)
        product = x1 @ x2
        product = product if bias is None else product + bias
    return collectives.all_reduce(product, process_group(hcom, "hcom")).view(residual.shape) + residual


def npu_mm_all_reduce_add_rms_norm_reference(
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
    """Compute ``y = sum over ranks of (x1 · x2 + bias) + residual`` and ``RMSNorm(y) * gamma``.

    Args:
        x1: ``[b, s, k]`` or ``[s, k]``.
        x2: ``[k, n]``; a transposed view is fine.
        residual: ``[b, s, n]`` with as many rows as ``x1``.
        gamma: ``[n]``, dtype of ``residual``.
        hcom: the group whose ranks are summed, or its name.
        reduce_op: ``sum``.
        epsilon: added to the mean square.
        bias: ``[n]``, added on every rank.
        antiquant_scale: for an int8 ``x2``: ``[1]``, ``[n]`` or ``[ceil(k / group size), n]``.
        antiquant_offset: like ``antiquant_scale``, added to ``x2`` before it is scaled.
        dequant_scale: for int8 operands: ``[1]`` or ``[n]``, packed int64 or a number.
        antiquant_group_size: rows of ``x2`` that share a scale.
        comm_turn: 0.

    Returns:
        ``y`` and its norm, both with shape and dtype of ``residual``.
    """
    quantization = (antiquant_scale, antiquant_offset, dequant_scale, antiquant_group_size)
    total = _total(x1, x2, residual, hcom, bias, *quantization)
    return total, rms_norm_reference(total, gamma, epsilon)


npu_mm_all_reduce_add_rms_norm = Operator(
    "npu_mm_all_reduce_add_rms_norm",
    npu_mm_all_reduce_add_rms_norm_reference,
    contract=CONTRACT,
    saved="both operands, the sum, and one number per row",
)


@npu_mm_all_reduce_add_rms_norm.backend("composed", ("cpu", "cuda", "npu"))
@with_signature_of(npu_mm_all_reduce_add_rms_norm_reference)
def _composed(*, gamma: Tensor, epsilon: float, **others: Any) -> tuple[Tensor, Tensor]:
    """Compute the definition with the fused norm, which keeps the sum and one number per row."""
    total = _total(**others)
    return total, rms_norm(total, gamma, epsilon)


class _ProductSummed(torch.autograd.Function):
    """The kernel with built-in communication has no backward: it is two products of this rank's operands."""

    @staticmethod
    def forward(
        ctx: Any, x1: Tensor, x2: Tensor, bias: Tensor | None, name: str, quantization: dict[str, Any]
    ) -> Tensor:
        import torch_npu

        ctx.save_for_backward(x1, x2)
        result: Tensor = torch_npu.npu_mm_all_reduce_base(
            x1, x2, name, reduce_op="sum", bias=bias, comm_turn=0, **quantization
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x1, x2 = ctx.saved_tensors
        dy = gradients[0]
        rows = dy.reshape(-1, dy.shape[-1])
        dx1 = dy @ x2.t() if ctx.needs_input_grad[0] else None
        dx2 = x1.reshape(-1, x1.shape[-1]).t() @ rows if ctx.needs_input_grad[1] else None
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx1, dx2, dbias, None, None


@npu_mm_all_reduce_add_rms_norm.backend(
    "npu",
    ("npu",),
    priority=10,
    available=torch_npu_missing,
    contract=(Dtype("x1", (*HALF, torch.int8)), Dtype("residual", HALF)),
)
@with_signature_of(npu_mm_all_reduce_add_rms_norm_reference)
def _npu(
    *,
    x1: Tensor,
    x2: Tensor,
    residual: Tensor,
    gamma: Tensor,
    hcom: Group,
    reduce_op: str,
    epsilon: float,
    bias: Tensor | None,
    comm_turn: int,
    **quantization: Any,
) -> tuple[Tensor, Tensor]:
    group = process_group(hcom, "hcom")
    if not mc2_sums(x1, x2, group):
        total = _total(x1, x2, residual, group, bias, **quantization)
        return total, rms_norm(total, gamma, epsilon)
    product = _ProductSummed.apply(x1.contiguous(), x2, bias, hccl_name(group), quantization)
    total = product.view(residual.shape) + residual
    return total, rms_norm(total, gamma, epsilon)
