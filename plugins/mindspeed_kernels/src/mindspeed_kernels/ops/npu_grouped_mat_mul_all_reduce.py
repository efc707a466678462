"""Matrix products of several pairs, each summed over the ranks of a group. For inference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import Choice, ContractError, Dtype
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.process_groups import process_group
from mindspeed_kernels.ops.row_groups import ends_of_groups

_MOST = 64
"""Pairs in one call."""


def npu_grouped_mat_mul_all_reduce_reference(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    hcomm: ProcessGroup | str | None,
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Sequence[int] | None = None,
    split_item: int = 0,
    reduce_op: str = "sum",
    comm_turn: int = 0,
) -> list[Tensor]:
    """Compute ``y_i = sum over ranks of (x_i · W_i + b_i)``.

    Args:
        x: one tensor ``[m_i, k_i]`` for each weight; with ``split_item`` 1 and 3 one ``[m, k]`` for all.
        weight: ``[k_i, n_i]`` each, up to 64.
        hcomm: the group whose ranks are summed, or its name.
        bias: ``[n_i]`` each; every rank adds it. Empty or None for none.
        group_list: running ends of the rows of each weight, with ``split_item`` 1 and 3.
        split_item: 0 takes and gives a tensor for each weight; 1 takes one for all; 2 gives one; 3 both.
        reduce_op: ``sum``.
        comm_turn: 0.

    Returns:
        A tensor ``[m_i, n_i]`` for each weight, or a single ``[m, n]`` with ``split_item`` 2 and 3.
    """
    group = process_group(hcomm, "hcomm")
    pieces = _pieces(x, weight, bias, group_list, split_item)
    products = [rows @ matrix for rows, matrix in zip(pieces, weight, strict=True)]
    if bias:
        products = [product + shift.to(product.dtype) for product, shift in zip(products, bias, strict=True)]
    if split_item in (2, 3):
        products = [torch.cat(products)]
    works = [dist.all_reduce(product, group=group, async_op=True) for product in products]
    for work in works:
        work.wait()
    return products


def _pieces(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    bias: Sequence[Tensor] | None,
    group_list: Sequence[int] | None,
    split_item: int,
) -> Sequence[Tensor]:
    name = "npu_grouped_mat_mul_all_reduce"
    if not 1 <= len(weight) <= _MOST:
        raise ContractError(f"{name}: weight must have 1 to {_MOST} tensors, got {len(weight)}")
    if bias and len(bias) != len(weight):
        raise ContractError(f"{name}: bias must have {len(weight)} tensors like weight, got {len(bias)}")
    if split_item in (0, 2):
        if len(x) != len(weight) or group_list is not None:
            raise ContractError(
                f"{name}: split_item {split_item} needs one x for each of the {len(weight)} weights and no "
                f"group_list, got {len(x)} and group_list {group_list}"
            )
        return x
    if len(x) != 1 or group_list is None:
        raise ContractError(
            f"{name}: split_item {split_item} needs one x and a group_list, got {len(x)} and {group_list}"
        )
    ends: list[int] = ends_of_groups(name, group_list, x[0].shape[0], len(weight)).tolist()
    return [x[0][start:end] for start, end in zip([0, *ends], ends, strict=False)]


npu_grouped_mat_mul_all_reduce = Operator(
    "npu_grouped_mat_mul_all_reduce",
    npu_grouped_mat_mul_all_reduce_reference,
    contract=(
        Dtype("x"),
        Dtype("weight"),
        Choice("split_item", (0, 1, 2, 3)),
        Choice("reduce_op", ("sum",)),
        Choice("comm_turn", (0,)),
    ),
    differentiable=False,
)
