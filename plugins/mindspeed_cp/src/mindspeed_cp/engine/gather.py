"""Every rank fetches the keys its queries see, and no others; then attention is local.

One exchange brings all of them, sorted by position, so that there is nothing to merge and the precision is
that of one process. Backward fetches them again and sends gradients the opposite way. Heads may be fetched in
groups, the next while those at hand are computed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_cp.engine.all_to_all import PartsExchange
from mindspeed_cp.engine.block import Work, attend, attend_backward
from mindspeed_cp.engine.exchange import Exchange
from mindspeed_cp.engine.layout import cut
from mindspeed_cp.engine.local import zeros_for
from mindspeed_cp.engine.merging import Merger, sink_gradient
from mindspeed_cp.engine.scores import Scores
from mindspeed_cp.options import CPOptions


@dataclass(frozen=True)
class GatherPlan:
    """A gathered attention, as one rank carries it out.

    Attributes:
        exchange: of keys and values.
        work: what is computed with the rows that were fetched.
        group: whose ranks exchange.
        options: how many groups of heads are fetched, and in which dtype gradients travel.
    """

    exchange: Exchange
    work: Work
    group: ProcessGroup
    options: CPOptions

    def parts(self, heads: int, key_heads: int) -> Iterator[tuple[slice, slice, Work]]:
        """Iterate over query heads, the key heads that they share, and their work."""
        share = heads // key_heads
        for start, end in cut(key_heads, min(self.options.head_groups, key_heads)):
            own = slice(start * share, end * share)
            work = tuple((samples, tasks, _heads_of(scores, own)) for samples, tasks, scores in self.work)
            yield own, slice(start, end), work


def _heads_of(scores: Scores, heads: slice) -> Scores:
    return replace(
        scores,
        heads=None if scores.heads is None else scores.heads[heads],
        slopes=None if scores.slopes is None else scores.slopes[heads],
    )


class GatheredAttention(torch.autograd.Function):
    """Keeps queries, local keys and values, the output and one number per row."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: GatherPlan, sink: Tensor | None = None
    ) -> Tensor:
        """Return ``[b, n, s, dv]`` of local queries ``[b, n, s, d]``; ``sink`` is ``[n]``."""
        merger = Merger(query, value.shape[-1], sink)
        for heads, (keys, values), work in _fetch_groups(query, key, value, plan):
            attend(merger.of_heads(heads), query[:, heads], keys, values, work)
        output = merger.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, merger.logsum, sink)
        ctx.plan = plan
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of local queries, keys and values, and of further scores."""
        query, key, value, output, logsum, sink = ctx.saved_tensors
        plan = ctx.plan
        dq, dk, dv = zeros_for(query, key, value)
        outer, start = gradients[0], 0
        for heads, (keys, values), work in _fetch_groups(query, key, value, plan):
            dkeys, dvalues = zeros_for(keys, values)
            results = output[:, heads], logsum[:, heads], outer[:, heads]
            attend_backward((dq[:, heads], dkeys, dvalues), query[:, heads], keys, values, *results, work)
            if not plan.options.wide_gradients:
                dkeys, dvalues = dkeys.to(key.dtype), dvalues.to(value.dtype)
            place = slice(start, start + keys.shape[1])
            dk[:, place], dv[:, place] = _send_gradients(dkeys, dvalues, key[:, place], value[:, place], plan)
            start = place.stop
        dsink = sink_gradient(sink, output, logsum, outer)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, dsink


def _fetch_groups(
    query: Tensor, key: Tensor, value: Tensor, plan: GatherPlan
) -> Iterator[tuple[slice, tuple[Tensor, Tensor], Work]]:
    """Iterate over groups of heads with their keys and values; the next are on their way meanwhile."""
    parts = list(plan.parts(query.shape[1], key.shape[1]))
    coming = [_Fetch(key[:, parts[0][1]], value[:, parts[0][1]], plan)]
    for index, (heads, _, work) in enumerate(parts):
        if index + 1 < len(parts):
            place = parts[index + 1][1]
            coming.append(_Fetch(key[:, place], value[:, place], plan))
        yield heads, coming.pop(0).wait(), work


class _Fetch:
    """Keys and values on their way here."""

    def __init__(self, key: Tensor, value: Tensor, plan: GatherPlan) -> None:
        self.plan, self.width = plan, key.shape[-1]
        both = torch.cat((key, value), dim=-1)
        self.shape = both.shape
        row = both.shape[0] * both.shape[1] * both.shape[3]
        self.exchange = PartsExchange(
            [both[:, :, _index(rows, both)].reshape(-1) for rows in plan.exchange.send],
            [rows * row for rows in plan.exchange.receive],
            plan.group,
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait and return keys and values of all rows that are needed here, in rising order of positions."""
        batch, heads, _, width = self.shape
        came = zip(self.exchange.wait(), self.plan.exchange.receive)
        arrived = torch.cat([part.view(batch, heads, rows, width) for part, rows in came], dim=2)
        whole = arrived[:, :, _index(self.plan.exchange.order, arrived)]
        return whole[..., : self.width].contiguous(), whole[..., self.width :].contiguous()


def _send_gradients(
    dk: Tensor, dv: Tensor, key: Tensor, value: Tensor, plan: GatherPlan
) -> tuple[Tensor, Tensor]:
    """Send the gradients of fetched rows back and add them up at their owners."""
    both = torch.cat((dk, dv), dim=-1)
    arrived = torch.empty_like(both)
    arrived[:, :, _index(plan.exchange.order, both)] = both
    parts = [part.reshape(-1) for part in arrived.split(plan.exchange.receive, dim=2)]
    row = both.shape[0] * both.shape[1] * both.shape[3]
    came = PartsExchange(parts, [len(rows) * row for rows in plan.exchange.send], plan.group).wait()
    (total,) = zeros_for(torch.cat((key, value), dim=-1))
    for rows, flat in zip(plan.exchange.send, came):
        part = flat.view(*both.shape[:2], len(rows), both.shape[3])
        total.index_add_(2, _index(rows, both), part.to(total.dtype))
    width = key.shape[-1]
    return total[..., :width], total[..., width:]


def _index(rows: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).to(like.device)
