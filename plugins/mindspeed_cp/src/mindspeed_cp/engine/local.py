"""Attention of one rank to keys it holds itself: the executor without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.engine.block import Merger, Scores, attend, attend_backward
from mindspeed_cp.engine.tasks import Task

Work = tuple[tuple[slice, tuple[Task, ...], Scores], ...]
"""Samples that share a mask rule, what is computed of them, and how."""


class LocalAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one number per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: Work) -> Tensor:
        """``[b, n, s, dv]`` of queries ``[b, n, s, d]`` and keys ``[b, g, t, d]``."""
        merger = Merger(query, value.shape[-1])
        for samples, tasks, scores in work:
            attend(merger, samples, query, key, value, tasks, scores)
        output = merger.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merger.logsum)
        ctx.work = work
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of queries, keys and values, added up in float32."""
        query, key, value, output, logsum = ctx.saved_tensors
        found = zeros_for(query, key, value)
        for samples, tasks, scores in ctx.work:
            attend_backward(found, samples, query, key, value, output, logsum, gradients[0], tasks, scores)
        return (*(part.to(like.dtype) for part, like in zip(found, (query, key, value))), None)


def zeros_for(*tensors: Tensor) -> tuple[Any, ...]:
    """Zeros to add gradients to, at least float32."""
    return tuple(
        torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors
    )
