"""Grouped products in MX formats, float8 with exponents shared by 32 numbers: ``npu_quant_group_gemm``.

Operands are rounded along the dimension that is summed, so that forward and each gradient round the same
tensor another way. Gradients are those of the product without rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.contract import (
    HALF,
    NPU_FLOATING,
    Choice,
    ContractError,
    Dtype,
    Rank,
    SameDtype,
    SameSize,
)
from mindspeed_kernels.ops.availability import kernel_of
from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_kernels.ops.mx_formats import E4M3, E5M2, Format, mx_rounded, mx_rounded_groups
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.row_groups import (
    bounds,
    by_row,
    ends_of_groups,
    npu_grouped_product,
    row_major,
    with_empty_group,
)


class _Formats(NamedTuple):
    """Formats of operands and of gradients."""

    operands: Format
    gradients: Format


FORMATS = {"E4M3": _Formats(E4M3, E4M3), "HYBRID": _Formats(E4M3, E5M2)}
"""By ``quant_format``."""


class _Products(NamedTuple):
    """The products of forward and backward, each rounding its operands first.

    Attributes:
        rows: ``x_e · W_e`` of ``[m, k]``, ``[E, k, n]`` and ends, by the formats of both.
        rows_transposed: ``dy_e · W_eᵀ`` of ``[m, n]`` and ``[E, k, n]``.
        weights: ``x_eᵀ · dy_e`` of ``[m, k]`` and ``[m, n]``, in a dtype.
    """

    rows: Callable[[Tensor, Tensor, Tensor, Format, Format], Tensor]
    rows_transposed: Callable[[Tensor, Tensor, Tensor, Format, Format], Tensor]
    weights: Callable[[Tensor, Tensor, Tensor, Format, Format, torch.dtype], Tensor]


def _rows(x: Tensor, weight: Tensor, ends: Tensor, of_x: Format, of_weight: Format) -> Tensor:
    return grouped_matmul(mx_rounded(x, -1, of_x), mx_rounded(weight, -2, of_weight), ends).to(x.dtype)


def _rows_transposed(dy: Tensor, weight: Tensor, ends: Tensor, of_dy: Format, of_weight: Format) -> Tensor:
    rounded = mx_rounded(weight, -1, of_weight).transpose(1, 2)
    return grouped_matmul(mx_rounded(dy, -1, of_dy), rounded, ends).to(dy.dtype)


def _weights(x: Tensor, dy: Tensor, ends: Tensor, of_x: Format, of_dy: Format, dtype: torch.dtype) -> Tensor:
    x, dy = mx_rounded_groups(x, ends, of_x), mx_rounded_groups(dy, ends, of_dy)
    return torch.stack([x[start:end].t() @ dy[start:end] for start, end in bounds(ends)]).to(dtype)


def _npu_product(
    x: Tensor, weight: Tensor, scales: tuple[Tensor, Tensor], ends: Tensor, dtype: torch.dtype, **options: int
) -> Tensor:
    import torch_npu

    return npu_grouped_product(
        x,
        weight,
        ends,
        per_token_scale=scales[0],
        scale=scales[1],
        output_dtype=dtype,
        per_token_scale_dtype=torch_npu.float8_e8m0fnu,
        scale_dtype=torch_npu.float8_e8m0fnu,
        **options,
    )


def _npu_quantized(x: Tensor, axis: int, form: Format) -> tuple[Tensor, Tensor]:
    import torch_npu

    result: tuple[Tensor, Tensor] = torch_npu.npu_dynamic_mx_quant(
        row_major(x), axis=axis, dst_type=form.dtype
    )
    return result


def _npu_quantized_groups(x: Tensor, ends: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    import torch_npu

    result: tuple[Tensor, Tensor] = torch_npu.npu_grouped_dynamic_mx_quant(
        row_major(x), ends.to(x.device, torch.int32), round_mode="rint", dst_type=form.dtype, blocksize=32
    )
    return result


def _npu_rows(x: Tensor, weight: Tensor, ends: Tensor, of_x: Format, of_weight: Format) -> Tensor:
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[2])
    ends, weight = with_empty_group(ends, weight)
    rows, of_rows = _npu_quantized(x, -1, of_x)
    weight, scale = _npu_quantized(weight, -2, of_weight)
    return _npu_product(rows, weight, (of_rows, scale), ends, x.dtype)


def _npu_rows_transposed(
    dy: Tensor, weight: Tensor, ends: Tensor, of_dy: Format, of_weight: Format
) -> Tensor:
    if not dy.shape[0]:
        return dy.new_empty(0, weight.shape[1])
    ends, weight = with_empty_group(ends, weight)
    rows, of_rows = _npu_quantized(dy, -1, of_dy)
    weight, scale = _npu_quantized(weight, -1, of_weight)
    return _npu_product(rows, weight.transpose(1, 2), (of_rows, scale.transpose(1, 2)), ends, dy.dtype)


def _npu_weights(
    x: Tensor, dy: Tensor, ends: Tensor, of_x: Format, of_dy: Format, dtype: torch.dtype
) -> Tensor:
    groups = ends.numel()
    if not x.shape[0]:
        # Kernels are not launched for tensors without elements, and what they return is never written.
        return x.new_zeros(groups, x.shape[1], dy.shape[1], dtype=dtype)
    (ends,) = with_empty_group(ends)
    (x, x_scale), (dy, scale) = _npu_quantized_groups(x, ends, of_x), _npu_quantized_groups(dy, ends, of_dy)
    scales = (x_scale.transpose(0, 1), scale)
    return _npu_product(x.t(), dy, scales, ends, dtype, group_type=2)[:groups]


_DEFINITION = _Products(_rows, _rows_transposed, _weights)
_KERNELS = _Products(_npu_rows, _npu_rows_transposed, _npu_weights)


class MxGroupedMatmul(torch.autograd.Function):
    """Keeps both operands as they are; each product rounds them again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        quant_format: str,
        parameter: Tensor | None,
        products: _Products,
    ) -> Tensor:
        """Multiply rows ``[m, k]`` with weights ``[E, k, n]``."""
        ctx.save_for_backward(x, weight, ends)
        ctx.how = FORMATS[quant_format], parameter, products
        form = FORMATS[quant_format].operands
        return products.rows(x, weight, ends, form, form)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients ``[m, k]`` and ``[E, k, n]``."""
        x, weight, ends = ctx.saved_tensors
        (of_operands, of_gradients), parameter, products = ctx.how
        dy = gradients[0].contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = products.rows_transposed(dy, weight, ends, of_gradients, of_operands)
        if ctx.needs_input_grad[1] and parameter is not None and parameter.grad is not None:
            total = parameter.grad.view(weight.shape)
            total += products.weights(x, dy, ends, of_operands, of_gradients, torch.float32)
            # Hooks of the parameter ask for a gradient all the same.
            dw = weight.new_zeros(()).expand(weight.shape)
        elif ctx.needs_input_grad[1]:
            dw = products.weights(x, dy, ends, of_operands, of_gradients, weight.dtype)
        return dx, dw, None, None, None, None


def mx_grouped_matmul_reference(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    quant_format: str = "E4M3",
    parameter: Tensor | None = None,
) -> Tensor:
    """Compute ``y_e = x_e · W_e`` for every group ``e`` of rows, of operands rounded to an MX format.

    Args:
        x: ``[m, k]``, rows of the groups behind one another, half precision or float32.
        weight: ``[E, k, n]``, dtype of ``x``.
        ends: ``[E]`` int64, where each group ends; groups may be empty.
        quant_format: ``"E4M3"``, or ``"HYBRID"`` with E5M2 for gradients.
        parameter: the parameter that ``weight`` is a view of; when given, backward adds the weight's gradient
            to ``parameter.grad`` in place, where there is one, and hands autograd zeros.

    Returns:
        ``[m, n]`` in the dtype of ``x``.
    """
    result: Tensor = MxGroupedMatmul.apply(x, weight, ends, quant_format, parameter, _DEFINITION)
    return result


mx_grouped_matmul = Operator(
    "mx_grouped_matmul",
    mx_grouped_matmul_reference,
    contract=(
        Rank("x", 2, 2),
        Rank("weight", 3, 3),
        Dtype("x", NPU_FLOATING),
        SameDtype(("x", "weight")),
        SameSize("weight", 1, "x", 1),
        Dtype("ends", (torch.int64,)),
        Rank("ends", 1, 1),
        SameSize("ends", 0, "weight", 0),
        Choice("quant_format", tuple(FORMATS)),
    ),
    saved="the rows and the weights",
)


@mx_grouped_matmul.backend(
    "npu",
    ("npu",),
    available=kernel_of(
        "950", calls=("npu_grouped_dynamic_mx_quant", "npu_dynamic_mx_quant", "float8_e8m0fnu")
    ),
    contract=(Dtype("x", HALF),),
)
def _npu(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    quant_format: str = "E4M3",
    parameter: Tensor | None = None,
) -> Tensor:
    # Kernels tell a transposed matrix by its strides, which a single number does not have.
    products = _KERNELS if min(weight.shape[1:]) > 1 else _DEFINITION
    result: Tensor = MxGroupedMatmul.apply(x, weight, ends, quant_format, parameter, products)
    return result


def npu_quant_group_gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens_per_expert: Sequence[int] | Tensor,
    weight_param: Tensor | None,
    quant_format: str,
    gemm_gradient_accumulation_fusion: bool,
) -> Tensor:
    """Compute `mx_grouped_matmul` of counted groups of rows.

    Args:
        x: ``[m, k]``.
        weight: ``[E, k, n]``.
        bias: ``[E, n]``, added to each group's rows; without gradient.
        tokens_per_expert: ``[E]``, rows of each group, list or integer tensor.
        weight_param: the parameter that ``weight`` is a view of.
        quant_format: ``"E4M3"`` or ``"HYBRID"``.
        gemm_gradient_accumulation_fusion: backward adds the weight's gradient to ``weight_param.grad`` in
            place, where there is one.

    Returns:
        ``[m, n]`` in the dtype of ``x``.

    Raises:
        ContractError: an argument is outside of what is computed; the message says which.
    """
    name = "npu_quant_group_gemm"
    if quant_format not in FORMATS:
        raise ContractError(
            f"{name}: quant_format must be one of {', '.join(FORMATS)}, got {quant_format!r}; HIF8 has no "
            "shared exponents"
        )
    if bias is not None and torch.is_grad_enabled() and bias.requires_grad:
        raise ContractError(f"{name}: bias has no gradient; detach it and add it to the result instead")
    if gemm_gradient_accumulation_fusion and weight_param is None:
        raise ContractError(
            f"{name}: gemm_gradient_accumulation_fusion adds to weight_param.grad; pass weight_param"
        )
    ends = ends_of_groups(name, tokens_per_expert, x.shape[0], weight.shape[0], counts=True)
    parameter = weight_param if gemm_gradient_accumulation_fusion else None
    result = mx_grouped_matmul(x, weight, ends, quant_format, parameter)
    return result if bias is None else result + by_row(bias.to(result.dtype), ends, x.shape[0])
