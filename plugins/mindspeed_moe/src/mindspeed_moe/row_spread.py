"""Rows sent once to each of several destinations, and their results summed in float32, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def spread(rows: Tensor, index: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the rows of each destination behind one another.

    Args:
        rows: ``[n, h]``.
        index: int64 ``[m]``, which rows each destination gets; one destination gets no row twice.
        counts: how many rows each destination gets; their sum is ``m``.

    Returns:
        ``[m, h]``. Gradients are summed in float32, destination by destination.
    """
    result: Tensor = _Spread.apply(rows, index, list(counts))
    return result


def gathered_sum(results: Tensor, index: Tensor, counts: Sequence[int], rows: int) -> Tensor:
    """Return the sums over destinations of each row's results, the mirror of `spread`.

    Args:
        results: ``[m, h]``, in the order of destinations.
        index: see `spread`.
        counts: see `spread`.
        rows: how many there are.

    Returns:
        ``[rows, h]`` in the dtype of the results, summed in float32.
    """
    total: Tensor = _Sum.apply(results, index, list(counts), rows)
    return total


def _summed(results: Tensor, index: Tensor, counts: Sequence[int], rows: int) -> Tensor:
    dtype = torch.promote_types(results.dtype, torch.float32)
    sums = results.new_zeros((rows, *results.shape[1:]), dtype=dtype)
    # No index twice in one addition: atomic additions of a device come in a fixed order.
    for part, places in zip(results.split(counts), index.split(counts), strict=True):
        sums.index_add_(0, places, part.to(dtype))
    return sums.to(results.dtype)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(index)
        ctx.counts, ctx.rows = counts, rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _summed(gradients[0], index, ctx.counts, ctx.rows), None, None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, results: Tensor, index: Tensor, counts: list[int], rows: int) -> Tensor:
        ctx.save_for_backward(index)
        return _summed(results, index, counts, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].index_select(0, index), None, None, None
