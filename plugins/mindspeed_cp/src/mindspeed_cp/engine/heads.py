"""Exchange of heads for positions (DeepSpeed-Ulysses): every rank gets the whole sequence for some heads.

Heads need not divide: ranges differ by at most one. Key heads go exactly where query heads need them;
gradients of those that went to several ranks are added up at home. Where few key heads would go to every rank
anyway, they can be gathered along the sequence instead, without a change of order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_cp.engine import counters
from mindspeed_cp.engine.all_to_all import PartsExchange

Transfer = Callable[..., Tensor]


def _to_heads(x: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    batch, width, local = x.shape[0], x.shape[3], x.shape[2]
    parts = [x[:, r.start : r.stop].reshape(-1) for r in heads]
    own_heads = heads[group.rank()]
    sizes = [batch * len(own_heads) * length * width for length in lengths]
    assert local == lengths[group.rank()]
    came = PartsExchange(parts, sizes, group).wait()
    pieces = [part.view(batch, len(own_heads), length, width) for part, length in zip(came, lengths)]
    return torch.cat(pieces, dim=2)


def _to_positions(y: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Invert `_to_heads`; heads that several ranks had are added up."""
    batch, width, total = y.shape[0], y.shape[3], heads[-1].stop
    parts = [part.reshape(-1) for part in y.split(list(lengths), dim=2)]
    local = lengths[group.rank()]
    sizes = [batch * len(r) * local * width for r in heads]
    came = PartsExchange(parts, sizes, group).wait()
    if sum(len(r) for r in heads) == total:
        pieces = [part.view(batch, len(r), local, width) for part, r in zip(came, heads)]
        return torch.cat(pieces, dim=1)
    result = y.new_zeros(batch, total, local, width, dtype=torch.promote_types(y.dtype, torch.float32))
    for part, r in zip(came, heads):
        result[:, r.start : r.stop] += part.view(batch, len(r), local, width)
    return result.to(y.dtype)


class _Exchange(torch.autograd.Function):
    """One of the two exchanges; the other brings gradients back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Callable[..., Tensor], back: Callable[..., Tensor], *how: Any
    ) -> Tensor:
        ctx.back, ctx.how = back, how
        return exchange(x, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0], *ctx.how), None, None, None, None, None


def to_heads(x: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange ``[b, n, s, d]`` of this rank's positions for ``[b, m, S, d]`` of its heads.

    Args:
        x: all heads of local positions.
        heads: the heads that each rank gets; ranges may share heads.
        lengths: positions of each rank.
        group: whose ranks exchange.
    """
    result: Tensor = _Exchange.apply(x, _to_heads, _to_positions, heads, lengths, group)
    return result


def to_positions(y: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """Exchange ``[b, m, S, d]`` of some heads for ``[b, n, s, d]`` of all heads at local positions."""
    result: Tensor = _Exchange.apply(y, _to_positions, _to_heads, heads, lengths, group)
    return result


def _to_whole(x: Tensor, lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    batch, heads, local, width = x.shape
    padded = x.new_zeros(batch, heads, max(lengths), width)
    padded[:, :, :local] = x
    counters.sent(counters.GATHER, padded.nbytes * (len(lengths) - 1))
    came = padded.new_empty(len(lengths) * batch, *padded.shape[1:])
    dist.all_gather_into_tensor(came, padded, group=group)
    return torch.cat([part[:, :, :length] for part, length in zip(came.split(batch), lengths)], dim=2)


class _ToWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], group: ProcessGroup, wide: bool) -> Tensor:
        ctx.how = (lengths, group, wide)
        return _to_whole(x, lengths, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        lengths, group, wide = ctx.how
        whole = gradients[0]
        travelling = torch.promote_types(whole.dtype, torch.float32) if wide else whole.dtype
        batch, heads, _, width = whole.shape
        parts = whole.new_zeros(len(lengths), batch, heads, max(lengths), width, dtype=travelling)
        for place, part in enumerate(whole.split(list(lengths), dim=2)):
            parts[place, :, :, : part.shape[2]] = part
        counters.sent(counters.GATHER, parts[0].nbytes * (len(lengths) - 1))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts.flatten(0, 1), group=group)
        return own[:, :, : lengths[group.rank()]].to(whole.dtype), None, None, None


def to_whole(x: Tensor, lengths: Sequence[int], group: ProcessGroup, *, wide: bool = True) -> Tensor:
    """Gather ``[b, n, s, d]`` of this rank's positions to ``[b, n, S, d]`` of all, the same on every rank.

    Args:
        x: all heads of local positions.
        lengths: positions of each rank; shorter ones are filled up to the longest while they travel.
        group: whose ranks gather.
        wide: gradients are added up in float32.
    """
    result: Tensor = _ToWhole.apply(x, lengths, group, wide)
    return result
