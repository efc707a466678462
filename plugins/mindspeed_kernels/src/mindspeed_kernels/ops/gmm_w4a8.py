"""Grouped products of 4-bit weights and 8-bit rows: ``npu_gmm`` as MindSpeed's ``gmm_w4a8`` has it.

Weights are rounded to MXFP4, 32 numbers of a row sharing an exponent, and are multiplied in MXFP8. That holds
them as they are whichever dimension shares the exponents, but for those that are 2**14 times smaller than a
number beside them. Rounding is left out of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.gmm_mxfp8 import mx_grouped_matmul
from mindspeed_kernels.ops.mx_formats import BLOCK, E2M1, mx_rounded
from mindspeed_kernels.ops.row_groups import by_row, ends_of_groups

GroupArguments = tuple[Any, int, int, int, int]
"""``(group_list, group_type, group_list_type, kind of the list, block_size)``."""


class _RoundedWeight(torch.autograd.Function):
    """Weights of 4 bits in their own dtype; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return mx_rounded(weight, -1, E2M1).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def npu_gmm(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group_list: Sequence[int] | Tensor | None = None,
    group_type: int = 0,
    original_weight: Tensor | None = None,
    block_size: int = BLOCK,
) -> Tensor:
    """Compute ``y_e = x_e · W_e`` for every group ``e`` of rows, of rows of 8 and weights of 4 bits.

    Args:
        x: ``[m, k]``, rows of the groups behind one another, half precision or float32.
        weight: ``[E, k, n]``, dtype of ``x``.
        bias: ``[E, n]``, added to each group's rows; without gradient.
        group_list: ``[E]``, where each group ends, list or integer tensor.
        group_type: 0, rows are grouped.
        original_weight: not read; the gradient is that of ``weight``.
        block_size: 32, the numbers that share an exponent.

    Returns:
        ``[m, n]`` in the dtype of ``x``.

    Raises:
        ContractError: an argument is outside of what is computed; the message says which.
    """
    name = "gmm_w4a8.npu_gmm"
    if block_size != BLOCK:
        raise ContractError(f"{name}: block_size must be {BLOCK}, as MX formats have it, got {block_size}")
    if group_type:
        raise ContractError(f"{name}: group_type must be 0, got {group_type}; the rows are grouped")
    if group_list is None:
        raise ContractError(f"{name}: group_list must say where each group of rows ends")
    if bias is not None and torch.is_grad_enabled() and bias.requires_grad:
        raise ContractError(f"{name}: bias has no gradient; detach it and add it to the result instead")
    ends = ends_of_groups(name, group_list, x.shape[0], weight.shape[0], counts=False)
    result = mx_grouped_matmul(x, _RoundedWeight.apply(weight), ends)
    return result if bias is None else result + by_row(bias.to(result.dtype), ends, x.shape[0])


class W4A8GMMFunction:
    """The same product as scripts call it that reach below `npu_gmm`."""

    @staticmethod
    def apply(
        original_weight: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group_args: GroupArguments | Sequence[Any],
    ) -> Tensor:
        """Compute a grouped product with its backward; see `npu_gmm` for the arguments.

        Args:
            original_weight: not read.
            x: ``[m, k]``.
            weight: ``[E, k, n]``.
            bias: ``[E, n]``, without gradient.
            group_args: see `GroupArguments`; the list is of ends.

        Returns:
            ``[m, n]``.

        Raises:
            ContractError: an argument is outside of what is computed, or the list is one of counts.
        """
        group_list, group_type, group_list_type, _, block_size = group_args
        if group_list_type:
            raise ContractError(
                f"W4A8GMMFunction: group_list_type must be 0, ends of groups, got {group_list_type}"
            )
        return npu_gmm(
            x,
            weight,
            bias=bias,
            group_list=group_list,
            group_type=group_type,
            original_weight=original_weight,
            block_size=block_size,
        )
