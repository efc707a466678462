"""Accumulation of a weight gradient: ``grad += grad_outputᵀ · total_input`` in place, in float32.

This is gradient accumulation fusion. A separate weight gradient never exists, and micro batches are added up
without being rounded to the parameters' dtype in between. The name and the argument order are those of the
operator library it replaces.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import HALF, Dtype, Rank, SameDtype, SameSize
from mindspeed_kernels.ops.availability import kernel_of
from mindspeed_kernels.ops.operator import Make, Operator, Sample

_ROWS = 512
"""Rows of bfloat16 operands that a CPU widens at a time."""


def npu_matmul_add_fp32_reference(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add ``grad_outputᵀ · total_input`` to ``grad`` in place.

    Args:
        total_input: ``[m, k]``, input of the linear layer, floating.
        grad_output: ``[m, n]``, gradient of its output, dtype of ``total_input``.
        grad: ``[n, k]``, float32 (bfloat16 and float16 are added to as well, with their own rounding).
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    product = grad_output.to(wide).t() @ total_input.to(wide)
    grad.copy_((grad.to(wide) + product).to(grad.dtype))


def npu_matmul_add_fp16(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add ``grad_outputᵀ · total_input`` to ``grad`` in place, of operands and gradients of one dtype.

    The product is rounded to that dtype before it is added.

    Args:
        total_input: ``[m, k]``.
        grad_output: ``[m, n]``.
        grad: ``[n, k]``.
    """
    if total_input.numel() and grad_output.numel():
        grad.add_(grad_output.t().matmul(total_input))


def _samples(make: Make) -> list[Sample]:
    x, dy = make(6, 8, dtype=torch.bfloat16), make(6, 16, dtype=torch.bfloat16)
    return [
        Sample((x, dy, make(16, 8, dtype=torch.float32)), backward=False),
        Sample((x[:0], dy[:0], make(16, 8, dtype=torch.float32)), backward=False),
    ]


npu_matmul_add_fp32 = Operator(
    "npu_matmul_add_fp32",
    npu_matmul_add_fp32_reference,
    contract=(
        Rank("total_input", 2, 2),
        Rank("grad_output", 2, 2),
        Rank("grad", 2, 2),
        Dtype("total_input"),
        Dtype("grad"),
        SameDtype(("total_input", "grad_output")),
        SameSize("grad_output", 0, "total_input", 0),
        SameSize("grad", 0, "grad_output", 1),
        SameSize("grad", 1, "total_input", 1),
    ),
    samples=_samples,
    differentiable=False,
)


@npu_matmul_add_fp32.backend("in-place", ("cpu",), differentiable=False)
def _blocks(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    """Add the product of a few widened rows at a time, so that no copy of an operand is ever whole."""
    if total_input.dtype == grad.dtype:
        grad.addmm_(grad_output.t(), total_input)
        return
    if grad.dtype not in (torch.float32, torch.float64):
        npu_matmul_add_fp32_reference(total_input, grad_output, grad)
        return
    for start in range(0, total_input.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        grad.addmm_(grad_output[rows].to(grad.dtype).t(), total_input[rows].to(grad.dtype))


def _mixed(call: Call) -> str:
    """Refuse mixed dtypes other than half precision operands and a float32 gradient."""
    operands, grad = call.dtype("total_input"), call.dtype("grad")
    if operands == grad or (operands in (torch.bfloat16, torch.float16) and grad == torch.float32):
        return ""
    return f"it adds to float32 or to the operands' dtype, not from {operands} to {grad}"


@npu_matmul_add_fp32.backend("addmm", ("cuda", "npu"), supports=_mixed, differentiable=False)
def _addmm(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    if not total_input.shape[0]:
        return
    if total_input.dtype == grad.dtype:
        grad.addmm_(grad_output.t(), total_input)
    else:
        torch.ops.aten.addmm.dtype_out(grad, grad_output.t(), total_input, torch.float32, out=grad)


def _atb_missing() -> str:
    reason = kernel_of("910B", "910_93")()
    if reason:
        return reason
    return "" if hasattr(torch.ops.atb, "_npu_matmul_add_fp32") else "libatb is not loaded"


@npu_matmul_add_fp32.backend(
    "atb",
    ("npu",),
    priority=10,
    available=_atb_missing,
    contract=(Dtype("total_input", HALF), Dtype("grad", (torch.float32,))),
    differentiable=False,
)
def _atb(total_input: Tensor, grad_output: Tensor, grad: Tensor) -> None:
    if total_input.numel() and grad_output.numel():
        torch.ops.atb._npu_matmul_add_fp32(grad_output, total_input, grad)
