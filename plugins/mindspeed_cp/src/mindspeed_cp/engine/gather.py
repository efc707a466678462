"""Every rank fetches the keys its queries see, and no others; then attention is local.

One exchange brings all of them, sorted by position, so that there is nothing to merge and the precision is
that of one process. Backward fetches them again and sends gradients the opposite way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_cp.engine import counters
from mindspeed_cp.engine.block import attend, attend_backward
from mindspeed_cp.engine.exchange import Exchange
from mindspeed_cp.engine.local import Work, zeros_for
from mindspeed_cp.engine.merging import Merger, sink_gradient


@dataclass(frozen=True)
class GatherPlan:
    """A gathered attention, as one rank carries it out.

    Attributes:
        exchange: of keys and values.
        work: what is computed with the rows that were fetched.
        group: whose ranks exchange.
        wide_gradients: gradients of keys and values travel in float32.
    """

    exchange: Exchange
    work: Work
    group: ProcessGroup
    wide_gradients: bool = True


class GatheredAttention(torch.autograd.Function):
    """Keeps queries, local keys and values, the output and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: GatherPlan, sink: Tensor | None = None
    ) -> Tensor:
        """``[b, n, s, dv]`` of local queries ``[b, n, s, d]`` and what they see; ``sink`` is ``[n]``."""
        merger = Merger(query, value.shape[-1], sink)
        keys, values = _fetch(key, value, plan)
        for samples, tasks, scores in plan.work:
            attend(merger, samples, query, keys, values, tasks, scores)
        output = merger.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merger.logsum, sink)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of local queries, keys and values, and of further scores."""
        query, key, value, output, logsum, sink = ctx.saved_tensors
        plan = ctx.plan
        keys, values = _fetch(key, value, plan)
        found = zeros_for(query, keys, values)
        for samples, tasks, scores in plan.work:
            attend_backward(found, samples, query, keys, values, output, logsum, gradients[0], tasks, scores)
        dq, dk, dv = found
        if not plan.wide_gradients:
            dk, dv = dk.to(key.dtype), dv.to(value.dtype)
        dk, dv = _return(dk, dv, key, value, plan)
        dsink = sink_gradient(sink, output, logsum, gradients[0])
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, dsink


def _fetch(key: Tensor, value: Tensor, plan: GatherPlan) -> tuple[Tensor, Tensor]:
    """Keys and values of all rows that are needed here, in rising order of positions."""
    both = torch.cat((key, value), dim=-1)
    parts = [both[:, :, _index(rows, both)].reshape(-1) for rows in plan.exchange.send]
    _count(parts, plan)
    row = both.shape[0] * both.shape[1] * both.shape[3]
    came = both.new_empty(sum(plan.exchange.receive) * row)
    dist.all_to_all_single(
        came,
        torch.cat(parts),
        [rows * row for rows in plan.exchange.receive],
        [part.numel() for part in parts],
        group=plan.group,
    )
    pieces, start = [], 0
    for rows in plan.exchange.receive:
        pieces.append(came[start : start + rows * row].view(*both.shape[:2], rows, both.shape[3]))
        start += rows * row
    whole = torch.cat(pieces, dim=2)[:, :, _index(plan.exchange.order, both)]
    width = key.shape[-1]
    return whole[..., :width].contiguous(), whole[..., width:].contiguous()


def _return(dk: Tensor, dv: Tensor, key: Tensor, value: Tensor, plan: GatherPlan) -> tuple[Tensor, Tensor]:
    """Gradients of fetched rows, added up at their owners."""
    both = torch.cat((dk, dv), dim=-1)
    arrived = torch.empty_like(both)
    arrived[:, :, _index(plan.exchange.order, both)] = both
    parts = [part.reshape(-1) for part in arrived.split(plan.exchange.receive, dim=2)]
    _count(parts, plan)
    row = both.shape[0] * both.shape[1] * both.shape[3]
    sizes = [len(rows) * row for rows in plan.exchange.send]
    back = both.new_empty(sum(sizes))
    dist.all_to_all_single(back, torch.cat(parts), sizes, [part.numel() for part in parts], group=plan.group)
    (total,) = zeros_for(torch.cat((key, value), dim=-1))
    start = 0
    for rows, size in zip(plan.exchange.send, sizes):
        part = back[start : start + size].view(*both.shape[:2], len(rows), both.shape[3])
        total.index_add_(2, _index(rows, both), part.to(total.dtype))
        start += size
    width = key.shape[-1]
    return total[..., :width], total[..., width:]


def _index(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(like.device)


def _count(parts: list[Tensor], plan: GatherPlan) -> None:
    if counters.active is not None:
        me = plan.group.rank()
        foreign = sum(part.nbytes for place, part in enumerate(parts) if place != me)
        counters.sent(counters.ALL_TO_ALL, foreign)
