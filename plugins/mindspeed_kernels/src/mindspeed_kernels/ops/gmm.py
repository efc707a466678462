"""Grouped matrix product: consecutive groups of rows, each with a weight of its own (the experts of a layer).

`grouped_matmul` is the operator; `npu_gmm` and `npu_gmm_v2` are its interface with the names and the argument
order of the operator library it replaces. Backward can add weight gradients to ``main_grad`` in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from mindspeed_kernels.contract import NPU_FLOATING, ContractError, Dtype, Rank, SameDtype, SameSize
from mindspeed_kernels.ops.availability import kernel_of_training_devices
from mindspeed_kernels.ops.library import NAMESPACE, custom_op
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.row_groups import bounds, by_row, ends_of_groups, npu_grouped_product, row_major


def grouped_matmul_reference(
    x: Tensor, weight: Tensor, ends: Tensor, parameter: Tensor | None = None
) -> Tensor:
    """Compute ``y_e = x_e · W_e`` for every group ``e`` of rows.

    Args:
        x: ``[m, k]``, rows of the groups behind one another, floating.
        weight: ``[E, k, n]``, dtype of ``x``.
        ends: ``[E]`` int64, where each group ends; groups may be empty.
        parameter: the parameter that ``weight`` is a view of; when given, backward adds the weight's gradient
            to ``parameter.main_grad`` in place, marks it as added, and hands autograd nothing.

    Returns:
        ``[m, n]`` in the dtype of ``x``.
    """
    if parameter is not None:
        return _apply(x, weight, ends, parameter, "loop")
    return _loop(x, weight, ends)


def _loop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if not weight.shape[0]:
        return x.new_zeros(x.shape[0], weight.shape[-1])
    return torch.cat([x[start:end] @ weight[e] for e, (start, end) in enumerate(bounds(ends))])


def _loop_weights(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return torch.stack([x[start:end].t() @ dy[start:end] for start, end in bounds(ends)])


@custom_op("grouped_matmul_rows")
def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply as an opaque node: torch's shape function refuses what its kernel computes on CPUs."""
    if not (_aligned(x) and _aligned(weight)):
        return _loop(x, weight, ends)
    return F.grouped_mm(x, weight, offs=ends.to(x.device, torch.int32))


@_grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@custom_op("grouped_matmul_weights")
def _grouped_mm_weights(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    if not (_aligned(x) and _aligned(dy)):
        return _loop_weights(x, dy, ends)
    return F.grouped_mm(x.t(), dy, offs=ends.to(x.device, torch.int32))


@_grouped_mm_weights.register_fake
def _(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], dy.shape[1])


def _operations(rows: Sequence[int], weight: Sequence[int], ends: Any, **_: Any) -> int:
    """Count the operations of either product: each row meets one weight, or one gradient of a row."""
    return 2 * rows[0] * rows[1] * weight[-1]


_OPERATORS = getattr(torch.ops, NAMESPACE)
for _product in (_OPERATORS.grouped_matmul_rows, _OPERATORS.grouped_matmul_weights):
    register_flop_formula(_product)(_operations)


def _aligned(matrix: Tensor) -> bool:
    """Return whether torch's kernel can read it: one direction contiguous, the other in steps of 16 bytes."""
    rows, columns = matrix.stride()[-2:]
    step = max(rows, columns) * matrix.element_size()
    return 1 in (rows, columns) and step % 16 == 0 and matrix.numel() > 0


def _npu_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if weight.shape[0] == 1:  # The kernel takes no single group.
        return x @ weight[0]
    return npu_grouped_product(x, weight, ends)


def npu_weight_gradients(x: Tensor, dy: Tensor, ends: Tensor) -> Tensor:
    """Compute ``x_eᵀ · dy_e`` for every group of rows on an NPU: ``[E, k, n]``."""
    if ends.numel() == 1:
        return (x.t() @ dy).unsqueeze(0)
    if not x.shape[0]:
        # No expert of this rank has a token: the kernel would not be launched, its result never written.
        return x.new_zeros(ends.numel(), x.shape[1], dy.shape[1])
    return npu_grouped_product(row_major(x).t(), row_major(dy), ends, group_type=2)


_PRODUCTS: dict[str, tuple[Any, Any]] = {
    "loop": (_loop, _loop_weights),
    "grouped_mm": (_grouped_mm, _grouped_mm_weights),
    "npu": (_npu_rows, npu_weight_gradients),
}
"""Products of a backend: groups of rows with weights, and groups of rows with one another."""


class GroupedMatmulFunction(torch.autograd.Function):
    """Keeps both operands; backward is two grouped products, or one and an accumulation in place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, parameter: Tensor | None, products: str
    ) -> Tensor:
        """Multiply rows ``[m, k]`` with weights ``[E, k, n]``."""
        ctx.save_for_backward(x, weight, ends)
        ctx.parameter, ctx.products = parameter, products
        result: Tensor = _PRODUCTS[products][0](x, weight, ends)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients ``[m, k]`` and ``[E, k, n]``."""
        x, weight, ends = ctx.saved_tensors
        rows, weights = _PRODUCTS[ctx.products]
        # Kernels read no gradient that is expanded from one number.
        dy = gradients[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = rows(dy, weight.transpose(1, 2), ends)
        if ctx.needs_input_grad[1] and ctx.parameter is not None:
            npu_groupmatmul_add_fp32(x, dy, ends, ctx.parameter.main_grad.view(weight.shape))
            mark_added_to_main_grad(ctx.parameter)
        elif ctx.needs_input_grad[1]:
            dw = weights(x, dy, ends)
        return dx, dw, None, None, None


def mark_added_to_main_grad(parameter: Tensor) -> None:
    """Mark for distributed data parallelism that the gradient is in ``main_grad``.

    Its hooks ask for a ``grad`` all the same: one number in the parameter's shape, which autograd would copy
    to full size if it were handed over as a gradient.
    """
    parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if parameter.grad is None:
        parameter.grad = parameter.new_zeros(()).expand(parameter.shape)


def _apply(x: Tensor, weight: Tensor, ends: Tensor, parameter: Tensor | None, products: str) -> Tensor:
    result: Tensor = GroupedMatmulFunction.apply(x, weight, ends, parameter, products)
    return result


def _samples(make: Make) -> list[Sample]:
    ends = torch.tensor([3, 3, 9, 13])
    return [
        Sample((make(13, 8), make(4, 8, 16), ends)),
        Sample((make(13, 7), make(4, 7, 5), ends)),
        Sample((make(13, 8), make(1, 8, 16), ends[3:])),
        Sample((make(13, 8, dtype=torch.bfloat16), make(4, 8, 16, dtype=torch.bfloat16), ends)),
    ]


grouped_matmul = Operator(
    "grouped_matmul",
    grouped_matmul_reference,
    contract=(
        Rank("x", 2, 2),
        Rank("weight", 3, 3),
        Dtype("x"),
        SameDtype(("x", "weight")),
        SameSize("weight", 1, "x", 1),
        Dtype("ends", (torch.int64,)),
        Rank("ends", 1, 1),
    ),
    saved="the rows and the weights",
    samples=_samples,
)


@grouped_matmul.backend(
    "grouped_mm", ("cpu", "cuda"), contract=(Dtype("x", (torch.float32, torch.bfloat16, torch.float16)),)
)
def _torch(x: Tensor, weight: Tensor, ends: Tensor, parameter: Tensor | None = None) -> Tensor:
    return _apply(x, weight, ends, parameter, "grouped_mm")


@grouped_matmul.backend(
    "npu", ("npu",), available=kernel_of_training_devices, contract=(Dtype("x", NPU_FLOATING),)
)
def _npu(x: Tensor, weight: Tensor, ends: Tensor, parameter: Tensor | None = None) -> Tensor:
    return _apply(x, weight, ends, parameter, "npu")


def npu_gmm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Sequence[int] | Tensor | None = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Compute a grouped matrix product with running ends.

    Args:
        x: ``[m, k]``; with ``group_type=2`` the transposed operand ``[n_rows, m]`` whose columns are grouped.
        weight: ``[E, k, n]``; with ``group_type=2`` ``[m, n]``.
        bias: ``[E, n]``, added to each group's rows; without gradient.
        group_list: ``[E]`` running ends, list or int64 tensor; the last one is ``m``.
        group_type: 0 groups the rows, 2 the summed dimension (then the result is ``[E, n_rows, n]``).
        gemm_fusion: backward adds the weight's gradient to ``original_weight.main_grad`` in place.
        original_weight: the parameter that has ``main_grad``; needed with ``gemm_fusion``.

    Returns:
        ``[m, n]``, or ``[E, n_rows, n]`` with ``group_type=2``.

    Raises:
        ContractError: an argument is outside of what is computed; the message says which.
    """
    return _gmm(
        "npu_gmm", x, weight, bias, group_list, group_type, gemm_fusion, original_weight, counts=False
    )


def npu_gmm_v2(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Tensor | None = None,
    group_type: int = 0,
    gemm_fusion: bool = False,
    original_weight: Tensor | None = None,
) -> Tensor:
    """Compute `npu_gmm` with a tensor of counts: ``group_list[e]`` is the number of rows of group ``e``."""
    if group_list is not None and not isinstance(group_list, Tensor):
        raise ContractError("npu_gmm_v2: group_list must be a tensor of counts; npu_gmm takes lists")
    return _gmm(
        "npu_gmm_v2", x, weight, bias, group_list, group_type, gemm_fusion, original_weight, counts=True
    )


def npu_gmm_param_verification(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Sequence[int] | Tensor | None = None,
    group_type: int | None = 0,
    group_list_type: int = 0,
) -> None:
    """Refuse arguments that no grouped product takes, whatever the device.

    Args:
        x: see `npu_gmm`.
        weight: see `npu_gmm`.
        bias: see `npu_gmm`.
        group_list: list of integers, or one-dimensional int64 tensor; counts are a tensor.
        group_type: 0 or 2; None is 0.
        group_list_type: 0 for running ends, 1 for counts.

    Raises:
        TypeError: an argument is of another type.
        ValueError: ``group_list`` has more than one dimension.
        RuntimeError: tensors are on two devices.
    """
    tensors = {"x": x, "weight": weight, "bias": bias}
    for name, value in tensors.items():
        if not isinstance(value, Tensor) and (name != "bias" or value is not None):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value)}")
    if isinstance(group_list, Tensor):
        if group_list.dim() > 1:
            raise ValueError(f"group_list must be one-dimensional, got {group_list.dim()} dimensions")
        if group_list.dtype != torch.int64:
            raise TypeError(f"group_list must be int64, got {group_list.dtype}")
        tensors["group_list"] = group_list
    elif group_list is not None and (group_list_type or not all(isinstance(end, int) for end in group_list)):
        kind = "a torch.Tensor of counts" if group_list_type else "a list of int or a torch.Tensor"
        raise TypeError(f"group_list must be {kind}, got {type(group_list)}")
    if group_type is not None and not isinstance(group_type, int):
        raise TypeError(f"group_type must be an int or None, got {type(group_type)}")
    for name, value in tensors.items():
        if value is not None and value.device != x.device:
            raise RuntimeError(f"tensors are on two devices: x on {x.device}, {name} on {value.device}")


def _gmm(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_list: Sequence[int] | Tensor | None,
    group_type: int,
    gemm_fusion: bool,
    original_weight: Tensor | None,
    *,
    counts: bool,
) -> Tensor:
    if bias is not None and torch.is_grad_enabled() and bias.requires_grad:
        raise ContractError(f"{name}: bias has no gradient; detach it and add it to the result instead")
    if group_type == 2:
        return _summed_groups(name, x, weight, bias, group_list, counts=counts)
    if group_type != 0:
        raise ContractError(f"{name}: group_type must be 0 or 2, got {group_type}; nearest supported: 0")
    parameter = _with_main_grad(name, original_weight) if gemm_fusion else None
    ends = ends_of_groups(name, group_list, x.shape[0], weight.shape[0], counts=counts)
    result = grouped_matmul(x, weight, ends, parameter)
    if bias is not None:
        result = result + by_row(bias.to(result.dtype), ends, x.shape[0])
    return result


def _with_main_grad(name: str, parameter: Tensor | None) -> Tensor:
    if parameter is None or not isinstance(getattr(parameter, "main_grad", None), Tensor):
        raise ContractError(
            f"{name}: gemm_fusion adds to original_weight.main_grad, which is missing; pass the parameter "
            "that distributed data parallelism gave a main_grad, or leave gemm_fusion off"
        )
    return parameter


def _summed_groups(
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group_list: Sequence[int] | Tensor | None,
    *,
    counts: bool,
) -> Tensor:
    if bias is not None or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        raise ContractError(
            f"{name}: group_type 2 has neither bias nor backward; call it under torch.no_grad()"
        )
    groups = 1 if group_list is None else len(group_list)
    ends = ends_of_groups(name, group_list, weight.shape[0], groups, counts=counts)
    products = {"cpu": "grouped_mm", "cuda": "grouped_mm", "npu": "npu"}.get(x.device.type, "loop")
    if x.dtype == torch.float64 or (products == "npu" and kernel_of_training_devices()):
        products = "loop"
    result: Tensor = _PRODUCTS[products][1](x.t(), weight, ends)
    return result
