"""Cross entropy of each token over a vocabulary that ranks may hold in parts.

The fast paths keep the logits as they are, in 16 bits where the model computes in 16 bits, and two numbers
per token; megatron-core's keep a copy in float32. Everything is computed in float32 (float64 for float64);
the gradient is rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import Dtype, Rank, SameSize
from mindspeed_kernels.ops.cached_rows import row_blocks, rows_at_a_time
from mindspeed_kernels.ops.operator import Make, Operator, Sample
from mindspeed_kernels.ops.triton_kernels import (
    DEVICES,
    PRIORITY,
    only_floating,
    planned,
    rows_of,
    triton_missing,
)

_ELEMENTS = 1 << 22
"""Logits that are made float32 at a time where nothing else is done block by block."""
_CACHED_ELEMENTS = 1 << 16
"""The same on CPUs."""


def cross_entropy_reference(logits: Tensor, target: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Compute ``log(sum(exp(logits))) - logits[target]`` over the last dimension.

    Args:
        logits: ``[..., v]``, any floating dtype; with a group this rank's equal part of the vocabulary, in
            the order of the ranks.
        target: ``[...]`` int64, ids of the whole vocabulary. Ids outside of it have the logit zero.
        group: ranks that hold the vocabulary together; None where this one has all of it.

    Returns:
        ``[...]`` float32 (float64 for float64), the same on every rank of the group.
    """
    if group is not None and group.size() > 1:
        # Sums over ranks need a backward of their own.
        return _apply(CrossEntropyFunction, logits, target, group)
    wide = torch.promote_types(logits.dtype, torch.float32)
    values = logits.to(wide)
    inside = (target >= 0) & (target < logits.shape[-1])
    place = torch.where(inside, target, 0).unsqueeze(-1)
    predicted = torch.where(inside, values.gather(-1, place).squeeze(-1), 0.0)
    return values.logsumexp(-1) - predicted


class CrossEntropyFunction(torch.autograd.Function):
    """Keeps the logits and two numbers per token; works on a few rows at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None) -> Tensor:
        """Compute the losses of rows ``[r, v]``."""
        return _losses(ctx, logits, target, group, _statistics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits in their dtype."""
        logits, target, logsum = ctx.saved_tensors
        return _gradient(logits, target, logsum, gradients[0], ctx.first), None, None


class TritonCrossEntropyFunction(torch.autograd.Function):
    """Keeps the logits and two numbers per token; reads and writes everything once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None) -> Tensor:
        """Compute the losses of rows ``[r, v]``."""
        return _losses(ctx, logits, target, group, _statistics_at_once)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the logits in their dtype."""
        logits, target, logsum = ctx.saved_tensors
        if planned(logits):
            return torch.empty_like(logits, memory_format=torch.contiguous_format), None, None
        from mindspeed_kernels.device_kernels.cross_entropy import gradient_of_logits

        of_loss = gradients[0].contiguous()
        return gradient_of_logits(rows_of(logits), target, logsum, of_loss, ctx.first), None, None


def _losses(ctx: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None, statistics: Any) -> Tensor:
    ctx.first = 0 if group is None else group.rank() * logits.shape[1]
    logsum, predicted = statistics(logits, target, ctx.first)
    if group is not None and group.size() > 1:
        logsum, predicted = _over_ranks(logsum, predicted, group)
    ctx.save_for_backward(logits, target, logsum)
    loss: Tensor = logsum - predicted
    return loss


def _over_ranks(logsum: Tensor, predicted: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return the logarithm of the sum over all ranks, and the logit of the target, which one of them has."""
    top = logsum.clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    # A rank whose logits are all minus infinity has a part of nothing.
    both = torch.stack((torch.exp(logsum - top), predicted))
    dist.all_reduce(both, group=group)
    return top + both[0].log(), both[1]


def _statistics(logits: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Return the logarithm of each row's sum of exponentials, and the logit of its target, zero elsewhere."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logsum = logits.new_empty(logits.shape[0], dtype=wide)
    for block in row_blocks(logits.shape[0], _step(logits)):
        torch.logsumexp(logits[block].to(wide), -1, out=logsum[block])
    inside, place = _place(target, first, logits.shape[1])
    found = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1).to(wide)
    return logsum, torch.where(inside, found, 0.0)


def _statistics_at_once(logits: Tensor, target: Tensor, first: int) -> tuple[Tensor, Tensor]:
    if planned(logits):
        return (
            logits.new_empty(logits.shape[0], dtype=torch.float32),
            logits.new_empty(logits.shape[0], dtype=torch.float32),
        )
    from mindspeed_kernels.device_kernels.cross_entropy import statistics

    return statistics(rows_of(logits), target, first)


def _gradient(logits: Tensor, target: Tensor, logsum: Tensor, of_loss: Tensor, first: int) -> Tensor:
    """Return ``(softmax - onehot) * of_loss`` in the dtype of the logits, a few rows at a time."""
    result = torch.empty_like(logits, memory_format=torch.contiguous_format)
    inside, place = _place(target, first, logits.shape[1])
    taken = inside.to(logsum.dtype).neg_().unsqueeze(-1)
    for block in row_blocks(logits.shape[0], _step(logits)):
        share = logits[block] - logsum[block].unsqueeze(-1)
        share.exp_().scatter_add_(-1, place[block].unsqueeze(-1), taken[block])
        result[block] = share.mul_(of_loss[block].unsqueeze(-1))
    return result


def _place(target: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    place = target - first
    inside = (place >= 0) & (place < width)
    return inside, torch.where(inside, place, 0)


def _step(logits: Tensor) -> int:
    return rows_at_a_time(logits, _CACHED_ELEMENTS if logits.device.type == "cpu" else _ELEMENTS)


def _apply(function: Any, logits: Tensor, target: Tensor, group: ProcessGroup | None) -> Tensor:
    if torch.compiler.is_compiling() and (group is None or group.size() == 1):
        # A compiler fuses the definition itself.
        return cross_entropy_reference(logits, target)
    rows = logits.reshape(-1, logits.shape[-1])
    loss: Tensor = function.apply(rows, target.reshape(-1).contiguous(), group)
    return loss.view(target.shape)


def _key(logits: Tensor, target: Tensor, group: ProcessGroup | None = None) -> tuple[Any, ...]:
    return logits.device, logits.dtype, logits.ndim, target.ndim, group is None


def _samples(make: Make) -> list[Sample]:
    def ids(count: int, like: Tensor) -> Tensor:
        return torch.arange(count, device=like.device) * 5 % 37

    wide, flat = make(3, 2, 37), make(4, 64)
    return [
        Sample((wide, ids(6, wide).view(3, 2))),
        Sample((flat, ids(4, flat))),
        Sample((flat, ids(4, flat) - 1)),
        Sample((make(0, 8), ids(0, flat))),
    ]


cross_entropy = Operator(
    "cross_entropy",
    cross_entropy_reference,
    contract=(
        Dtype("logits"),
        Dtype("target", (torch.int64,)),
        Rank("logits", 2, 8),
        SameSize("target", 0, "logits", 0),
    ),
    key=_key,
    saved="the logits and two numbers per token",
    samples=_samples,
)


@cross_entropy.backend("rows", ("*",))
def _rows(logits: Tensor, target: Tensor, group: ProcessGroup | None = None) -> Tensor:
    return _apply(CrossEntropyFunction, logits, target, group)


@cross_entropy.backend(
    "triton", DEVICES, priority=PRIORITY, available=triton_missing, supports=only_floating("logits")
)
def _triton(logits: Tensor, target: Tensor, group: ProcessGroup | None = None) -> Tensor:
    return _apply(TritonCrossEntropyFunction, logits, target, group)
