"""Collectives that autograd follows, with the gradients of tensor and expert parallelism.

A gradient behind an all-reduce is the same on every rank already, so backward passes it on; gather and
reduce-scatter are each other's backward, and so is the exchange of its own inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Transfer = Callable[[Tensor, ProcessGroup], Tensor]


def gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``[w * m, ...]``: the tensors ``[m, ...]`` of all ranks of a group in order; no autograd."""
    result = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(result, x.contiguous(), group=group)
    return result


def scattered_sum(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``[m / w, ...]``: this rank's part of the sum of ``[m, ...]`` over a group; no autograd."""
    result = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    dist.reduce_scatter_tensor(result, x.contiguous(), group=group)
    return result


def exchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the chunks of the first dimension that all ranks send here, by sender; no autograd."""
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(result, x.contiguous(), group=group)
    return result


def _exchanged_rows(
    x: Tensor, group: ProcessGroup, *, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=group)
    return result


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    result = x.contiguous().clone()
    dist.all_reduce(result, group=group)
    return result


def _unchanged(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


class _Collective(torch.autograd.Function):
    """A collective, and the one that brings its gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, transfer: Transfer, back: Transfer) -> Tensor:
        ctx.how = group, back, transfer
        return transfer(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Collective.apply(gradients[0], *ctx.how), None, None, None


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; backward passes the gradient on."""
    result: Tensor = _Collective.apply(x, group, _summed, _unchanged)
    return result


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather along the first dimension; backward sums and scatters."""
    result: Tensor = _Collective.apply(x, group, gathered, scattered_sum)
    return result


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group and scatter along the first dimension; backward gathers."""
    result: Tensor = _Collective.apply(x, group, scattered_sum, gathered)
    return result


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send chunk ``i`` of the first dimension to rank ``i``; the result holds the chunks by sender."""
    result: Tensor = _Collective.apply(x, group, exchanged, exchanged)
    return result


def all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Send the next ``sent[i]`` rows to rank ``i``; the result holds ``received[i]`` rows of each rank."""
    transfer = partial(_exchanged_rows, sent=sent, received=received)
    result: Tensor = _Collective.apply(
        x, group, transfer, partial(_exchanged_rows, sent=received, received=sent)
    )
    return result
