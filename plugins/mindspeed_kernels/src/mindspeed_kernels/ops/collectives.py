"""Collectives that autograd follows, with the gradients of tensor and expert parallelism.

A gradient behind an all-reduce is the same on every rank already, so backward passes it on; gather and
reduce-scatter are each other's backward, and so is the exchange of its own inverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


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


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        result = x.contiguous().clone()
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scattered_sum(gradients[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return scattered_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gathered(gradients[0], ctx.group), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradients[0], ctx.group), None


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group; backward passes the gradient on."""
    result: Tensor = _AllReduce.apply(x, group)
    return result


def all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Gather along the first dimension; backward sums and scatters."""
    result: Tensor = _AllGather.apply(x, group)
    return result


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group and scatter along the first dimension; backward gathers."""
    result: Tensor = _ReduceScatter.apply(x, group)
    return result


def all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send chunk ``i`` of the first dimension to rank ``i``; the result holds the chunks by sender."""
    result: Tensor = _AllToAll.apply(x, group)
    return result
