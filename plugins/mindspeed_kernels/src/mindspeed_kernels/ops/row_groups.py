"""Groups of consecutive rows, as grouped products take them: where each ends, or how many rows it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError


def ends_of_groups(
    operator: str, group_list: Sequence[int] | Tensor | None, rows: int, groups: int, *, counts: bool = False
) -> Tensor:
    """Return where each group of rows ends, checked where that costs no synchronisation with a device.

    Args:
        operator: name for messages.
        group_list: running ends, or counts, one per group; list or one-dimensional integer tensor. None means
            one group of all rows.
        rows: number of rows there are.
        groups: number of groups there must be.
        counts: ``group_list`` holds the number of rows of each group.

    Returns:
        ``[groups]`` int64 on the device of the tensor that was given, on the CPU otherwise.

    Raises:
        ContractError: the numbers do not describe these rows.
    """
    if group_list is None:
        group_list = [rows]
    given = (
        group_list if isinstance(group_list, Tensor) else torch.tensor(list(group_list), dtype=torch.int64)
    )
    if given.dim() != 1 or given.dtype not in (torch.int64, torch.int32):
        raise ContractError(
            f"{operator}: group_list must be one-dimensional int64, got {given.dim()} dimensions of "
            f"{given.dtype}; nearest supported: a list of {groups} integers"
        )
    if given.numel() != groups:
        raise ContractError(
            f"{operator}: group_list must have one entry for each of the {groups} weights, got "
            f"{given.numel()}"
        )
    ends = given.to(torch.int64)
    if counts:
        ends = ends.cumsum(0)
    if ends.device.type == "cpu" and not is_traced(ends):
        _check(operator, ends.tolist(), rows, "counts" if counts else "ends")
    return ends


def _check(operator: str, ends: list[int], rows: int, kind: str) -> None:
    if any(after < before for before, after in zip([0, *ends], ends, strict=False)):
        rule = "must not be negative" if kind == "counts" else "must not decrease and not be negative"
        raise ContractError(f"{operator}: group_list ({kind}) {rule}, got ends {ends}")
    if ends and ends[-1] != rows:
        raise ContractError(
            f"{operator}: group_list ({kind}) must cover all {rows} rows, covers {ends[-1]}; "
            f"nearest supported: a last group that ends at {rows}"
        )


def is_traced(tensor: Tensor) -> bool:
    """Return whether the values are not known: fake tensors, and graphs that are being traced."""
    from torch._subclasses.fake_tensor import is_fake

    return torch.compiler.is_compiling() or is_fake(tensor)


def by_row(table: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Return a table ``[E, n]`` of groups as ``[m, n]``: the line of its group for each row."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).to(table.device)
    return table.repeat_interleave(counts, dim=0, output_size=rows)


def bounds(ends: Tensor) -> list[tuple[int, int]]:
    """Return the first and last row (not included) of each group; waits for the device of ``ends``."""
    numbers: list[int] = ends.tolist()
    return list(zip([0, *numbers], numbers, strict=False))


def with_empty_group(ends: Tensor, *tables: Tensor | None) -> tuple[Any, ...]:
    """Return ends ``[E]`` and tables ``[E, ...]`` of groups, with an empty group behind a single one.

    NPU kernels take at least two groups.
    """
    return (ends, *tables) if ends.numel() != 1 else tuple(_twice(table) for table in (ends, *tables))


def _twice(table: Tensor | None) -> Tensor | None:
    return None if table is None else torch.cat((table, table))


def row_major(matrix: Tensor) -> Tensor:
    """Return a matrix in rows behind one another, the strides of dimensions of one element included.

    NPU kernels tell a transposed matrix by its strides, which torch leaves open where a dimension is 1.
    """
    return matrix.contiguous().flatten().view(matrix.shape)


def npu_grouped_product(
    x: Tensor, weight: Tensor, ends: Tensor, *, group_type: int = 0, **options: Any
) -> Tensor:
    """Multiply groups of rows on an NPU.

    Args:
        x: ``[m, k]``.
        weight: ``[E, k, n]``; with ``group_type`` 2, which groups the summed dimension, ``[k, n]``.
        ends: int64 ``[E]``, where each group ends.
        group_type: 0 or 2.
        options: further options of ``torch_npu.npu_grouped_matmul``; tensors are put into lists.
    """
    import torch_npu

    if group_type == 0:  # The kernel reads no rows of a transposed matrix.
        x = row_major(x)
    listed = {name: [value] if isinstance(value, Tensor) else value for name, value in options.items()}
    ends = ends.to(x.device)
    result: Tensor = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=3, group_type=group_type, group_list_type=0, **listed
    )[0]
    return result
