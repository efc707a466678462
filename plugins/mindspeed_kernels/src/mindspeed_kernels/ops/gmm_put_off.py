"""The grouped product whose weight gradient somebody else computes, later or at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.ops.gmm import grouped_matmul, mark_added_to_main_grad, npu_gmm
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32

Leave = Callable[..., None]
"""Takes a function and the tensors to call it with, and calls it once, later or at once."""


def weight_gradient(
    parameter: Any, rows: Tensor, gradient: Tensor, ends: Tensor, shape: torch.Size, *, accumulates: bool
) -> Tensor | None:
    """Compute the gradient of the weights of a grouped product.

    Args:
        parameter: of the weights.
        rows: ``[m, k]``, of the product.
        gradient: ``[m, n]``, of its result.
        ends: ``[E]``, where the rows of each group end.
        shape: ``[E, k, n]``, of the weights.
        accumulates: add it to the main gradient.

    Returns:
        It, in the parameter's shape; None where it was added to the main gradient.
    """
    if accumulates:
        npu_groupmatmul_add_fp32(rows, gradient, ends, parameter.main_grad.view(shape))
        mark_added_to_main_grad(parameter)
        return None
    return npu_gmm(rows.t(), gradient, group_list=ends, group_type=2).view(parameter.shape)


@torch.no_grad()
def add_weight_gradient(
    parameter: Any, rows: Tensor, gradient: Tensor, ends: Tensor, shape: torch.Size, *, accumulates: bool
) -> None:
    """Add the gradient of the weights of a grouped product to the parameter's; see `weight_gradient`."""
    made = weight_gradient(parameter, rows, gradient, ends, shape, accumulates=accumulates)
    if made is not None:
        parameter.grad = made if parameter.grad is None else parameter.grad + made


class PutOffProduct(torch.autograd.Function):
    """Backward returns the gradient of the rows, and hands on what the weight's gradient is made of."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        parameter: Tensor,
        shape: tuple[int, ...],
        ends: Tensor,
        leave: Leave,
        accumulates: bool,
    ) -> Tensor:
        """Multiply rows ``[m, k]`` with a parameter seen as ``[E, k, n]``."""
        ctx.save_for_backward(rows, parameter, ends)
        ctx.shape, ctx.leave, ctx.accumulates = shape, leave, accumulates
        # Hooks on saved tensors make another tensor of a saved parameter, whose ``grad`` nobody reads.
        ctx.parameter = parameter
        return grouped_matmul(rows, parameter.view(shape), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient ``[m, k]``, and none of the parameter."""
        rows, weight, ends = ctx.saved_tensors
        parameter, gradient, accumulates = ctx.parameter, gradients[0].contiguous(), ctx.accumulates
        to_rows = None
        if ctx.needs_input_grad[0]:
            to_rows = grouped_matmul(gradient, weight.view(ctx.shape).transpose(1, 2), ends)
        whole = weight.view(ctx.shape).shape

        def compute(rows: Tensor, gradient: Tensor) -> None:
            add_weight_gradient(parameter, rows, gradient, ends, whole, accumulates=accumulates)

        ctx.leave(compute, rows, gradient)
        return to_rows, None, None, None, None, None
