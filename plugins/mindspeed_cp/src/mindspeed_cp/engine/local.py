"""Attention of one rank to keys it holds itself: the executor without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_cp.engine.block import Work, attend, attend_backward
from mindspeed_cp.engine.layout import Chunks
from mindspeed_cp.engine.merging import Merger, sink_gradient
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.engine.tasks import tasks


def work_with(samples: Sequence[tuple[slice, Scores]], queries: Chunks, keys: Chunks) -> Work:
    """Return what is computed of query rows with key rows; samples of which nothing is are left out."""
    return tuple(
        (which, found, scores)
        for which, scores in samples
        if (found := tasks(scores.rule, queries, keys, positions=scores.positional))
    )


class LocalAttention(torch.autograd.Function):
    """Keeps queries, keys, values, the output and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: Work, sink: Tensor | None = None
    ) -> Tensor:
        """Return ``[b, n, s, dv]`` of ``[b, n, s, d]`` queries, ``[b, g, t, d]`` keys; ``sink``: ``[n]``."""
        merger = Merger(query, value.shape[-1], sink)
        attend(merger, query, key, value, work)
        output = merger.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merger.logsum, sink)
        ctx.work = work
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values, added up in float32, and of further scores."""
        query, key, value, output, logsum, sink = ctx.saved_tensors
        found = zeros_for(query, key, value)
        attend_backward(found, query, key, value, output, logsum, gradients[0], ctx.work)
        dq, dk, dv = (part.to(like.dtype) for part, like in zip(found, (query, key, value)))
        return dq, dk, dv, None, sink_gradient(sink, output, logsum, gradients[0])


def zeros_for(*tensors: Tensor) -> tuple[Any, ...]:
    """Return zeros to add gradients to, at least float32."""
    return tuple(
        torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors
    )
