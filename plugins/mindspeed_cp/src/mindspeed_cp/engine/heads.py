"""Exchange of heads for positions (DeepSpeed-Ulysses): every rank gets the whole sequence for some heads.

Heads need not divide: ranges differ by at most one. Key heads go exactly where query heads need them;
gradients of those that went to several ranks are added up at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class HeadPlan:
    """Which heads each rank gets.

    Attributes:
        queries: query heads of every rank, a range each.
        keys: key heads that those query heads need.
        expand: for each of this rank's query heads the place of its key head among those it got; empty where
            equal numbers of neighbouring query heads share a key head, as kernels take them.
    """

    queries: tuple[range, ...]
    keys: tuple[range, ...]
    expand: tuple[int, ...]


@lru_cache(maxsize=64)
def head_plan(query_heads: int, key_heads: int, ranks: int, rank: int) -> HeadPlan:
    """Split query heads into consecutive ranges, and find the key heads of each.

    Raises:
        ValueError: there are fewer query heads than ranks, or they do not share key heads evenly.
    """
    if query_heads < ranks:
        raise ValueError(f"{query_heads} query heads cannot be split over {ranks} ranks")
    if query_heads % key_heads:
        raise ValueError(f"{query_heads} query heads cannot share {key_heads} key heads evenly")
    share = query_heads // key_heads
    base, longer = divmod(query_heads, ranks)
    queries, keys, start = [], [], 0
    for place in range(ranks):
        end = start + base + (place < longer)
        queries.append(range(start, end))
        keys.append(range(start // share, (end - 1) // share + 1))
        start = end
    mine = [head // share - keys[rank].start for head in queries[rank]]
    even = len(mine) % len(keys[rank]) == 0
    regular = even and mine == [place // (len(mine) // len(keys[rank])) for place in range(len(mine))]
    return HeadPlan(tuple(queries), tuple(keys), () if regular else tuple(mine))


def _to_heads(x: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    batch, width, local = x.shape[0], x.shape[3], x.shape[2]
    parts = [x[:, r.start : r.stop].reshape(-1) for r in heads]
    mine = heads[group.rank()]
    sizes = [batch * len(mine) * length * width for length in lengths]
    came = x.new_empty(sum(sizes))
    dist.all_to_all_single(came, torch.cat(parts), sizes, [part.numel() for part in parts], group=group)
    assert local == lengths[group.rank()]
    pieces = [part.view(batch, len(mine), length, width) for part, length in zip(came.split(sizes), lengths)]
    return torch.cat(pieces, dim=2)


def _to_positions(
    y: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup, total: int
) -> Tensor:
    """The inverse; heads that several ranks had are added up."""
    batch, width = y.shape[0], y.shape[3]
    parts = [part.reshape(-1) for part in y.split(list(lengths), dim=2)]
    local = lengths[group.rank()]
    sizes = [batch * len(r) * local * width for r in heads]
    came = y.new_empty(sum(sizes))
    dist.all_to_all_single(came, torch.cat(parts), sizes, [part.numel() for part in parts], group=group)
    if sum(len(r) for r in heads) == total:
        pieces = [part.view(batch, len(r), local, width) for part, r in zip(came.split(sizes), heads)]
        return torch.cat(pieces, dim=1)
    result = y.new_zeros(batch, total, local, width, dtype=torch.promote_types(y.dtype, torch.float32))
    for part, r in zip(came.split(sizes), heads):
        result[:, r.start : r.stop] += part.view(batch, len(r), local, width)
    return result.to(y.dtype)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.how = (heads, lengths, group, x.shape[1])
        return _to_heads(x, heads, lengths, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _to_positions(gradients[0], *ctx.how), None, None, None


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup
    ) -> Tensor:
        ctx.how = (heads, lengths, group)
        return _to_positions(y, heads, lengths, group, heads[-1].stop)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _to_heads(gradients[0], *ctx.how), None, None, None


def to_heads(x: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """``[b, n, s, d]`` of this rank's positions to ``[b, m, S, d]`` of its heads.

    Args:
        x: all heads of local positions.
        heads: the heads that each rank gets; ranges may share heads.
        lengths: positions of each rank.
        group: whose ranks exchange.
    """
    result: Tensor = _ToHeads.apply(x, heads, lengths, group)
    return result


def to_positions(y: Tensor, heads: Sequence[range], lengths: Sequence[int], group: ProcessGroup) -> Tensor:
    """The way back: ``[b, m, S, d]`` of some heads to ``[b, n, s, d]`` of all heads, for local positions."""
    result: Tensor = _ToPositions.apply(y, heads, lengths, group)
    return result
