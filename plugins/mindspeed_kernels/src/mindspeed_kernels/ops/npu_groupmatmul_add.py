"""Accumulation of the weight gradients of grouped products: ``grad[e] += x_eᵀ · dy_e``, in float32, in place.

The counterpart of `npu_matmul_add` for experts whose rows lie behind one another. Names and argument order
are those of the operator library it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_kernels.contract import HALF, Dtype, Rank, SameDtype, SameSize
from mindspeed_kernels.ops.availability import kernel_of
from mindspeed_kernels.ops.library import custom_op
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.row_groups import bounds, ends_of_groups


def npu_groupmatmul_add_fp32_reference(
    x: Tensor, dy: Tensor, grouplist: Sequence[int] | Tensor, grad: Tensor
) -> None:
    """Add ``x_eᵀ · dy_e`` to ``grad[e]`` in place, for every group ``e`` of rows.

    Args:
        x: ``[m, k]``, inputs, floating.
        dy: ``[m, n]``, gradients of the outputs, dtype of ``x``.
        grouplist: ``[E]`` running ends of the groups, list or int64 tensor; empty groups are fine.
        grad: ``[E, k, n]`` or ``[E * k, n]``, float32.
    """
    experts, ends = _by_expert(x, grouplist, grad)
    wide = torch.promote_types(grad.dtype, torch.float32)
    for expert, (start, end) in zip(experts, bounds(ends), strict=True):
        product = x[start:end].to(wide).t() @ dy[start:end].to(wide)
        expert.copy_((expert.to(wide) + product).to(grad.dtype))


def _by_expert(x: Tensor, grouplist: Sequence[int] | Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient as ``[E, k, n]``, and where each expert's rows end."""
    experts = grad if grad.dim() == 3 else grad.view(-1, x.shape[1], grad.shape[1])
    return experts, ends_of_groups("npu_groupmatmul_add_fp32", grouplist, x.shape[0], experts.shape[0])


def _samples(make: Make) -> list[Sample]:
    x, dy = make(9, 8, dtype=torch.bfloat16), make(9, 16, dtype=torch.bfloat16)
    ends = [2, 2, 9]
    return [
        Sample((x, dy, ends, make(3, 8, 16, dtype=torch.float32)), backward=False),
        Sample((x, dy, ends, make(24, 16, dtype=torch.float32)), backward=False),
    ]


npu_groupmatmul_add_fp32 = Operator(
    "npu_groupmatmul_add_fp32",
    npu_groupmatmul_add_fp32_reference,
    contract=(
        Rank("x", 2, 2),
        Rank("dy", 2, 2),
        Rank("grad", 2, 3),
        Dtype("x"),
        Dtype("grad"),
        SameDtype(("x", "dy")),
        SameSize("dy", 0, "x", 0),
        SameSize("grad", -1, "dy", 1),
    ),
    samples=_samples,
    differentiable=False,
)


@custom_op("groupmatmul_add_fp32_", mutates_args=("grad",))
def _opaque(x: Tensor, dy: Tensor, ends: Tensor, grad: Tensor) -> None:
    for expert, (start, end) in zip(grad, bounds(ends), strict=True):
        if end > start:
            npu_matmul_add_fp32(dy[start:end], x[start:end], expert)


@_opaque.register_fake
def _(x: Tensor, dy: Tensor, ends: Tensor, grad: Tensor) -> None:
    return None


@npu_groupmatmul_add_fp32.backend("in-place", ("cpu", "cuda", "npu"), differentiable=False)
def _in_place(x: Tensor, dy: Tensor, grouplist: Sequence[int] | Tensor, grad: Tensor) -> None:
    """Add one product for each group that has rows; a compiled graph sees one node."""
    experts, ends = _by_expert(x, grouplist, grad)
    _opaque(x, dy, ends, experts)


@npu_groupmatmul_add_fp32.backend(
    "npu",
    ("npu",),
    priority=10,
    available=kernel_of(
        "910B", "910_93", calls=("npu_grouped_matmul_add_",), arguments=("group_list", "group_list_type")
    ),
    contract=(Dtype("x", HALF), Dtype("grad", (torch.float32,))),
    differentiable=False,
)
def _npu(x: Tensor, dy: Tensor, grouplist: Sequence[int] | Tensor, grad: Tensor) -> None:
    import torch_npu

    experts, ends = _by_expert(x, grouplist, grad)
    if experts.shape[0] == 1:  # The kernel takes no single group.
        npu_matmul_add_fp32(dy, x, experts[0])
        return
    if not x.shape[0]:
        return
    ends = ends.to(x.device)
    torch_npu.npu_grouped_matmul_add_(experts, x, dy, ends, transpose_x=True, group_type=2, group_list_type=0)
