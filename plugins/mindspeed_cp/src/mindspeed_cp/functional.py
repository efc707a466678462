"""Attention over a sequence that is split over the ranks of any process group, as plain functions.

For models without megatron-core, and for lengths that no layout plans: every rank holds as many tokens as it
likes, none included. Ranks hold consecutive parts of the sequence, in the order of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.layout import Layout
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, RING, Grid
from mindspeed_cp.options import CPOptions


@dataclass(frozen=True)
class Mask:
    """The keys that a query sees, by positions in the whole sequence.

    Attributes:
        causal: no later key.
        ends: running ends of documents that do not see one another; empty for one document.
        window: at most this many keys before the query; None for all of them.
    """

    causal: bool = True
    ends: tuple[int, ...] = ()
    window: int | None = None


def agreed_lengths(local: int, group: ProcessGroup, device: torch.device | str = "cpu") -> tuple[int, ...]:
    """Gather the number of tokens of every rank: one all-gather of one integer, for all layers of a step.

    Args:
        local: tokens of this rank.
        group: whose ranks share the sequence.
        device: where the group communicates.
    """
    own = torch.tensor([local], dtype=torch.int64, device=device)
    everyones = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(everyones, own, group=group)
    return tuple(everyones.tolist())


def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup,
    lengths: Sequence[int] | None = None,
    *,
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Tensor:
    """Compute attention by an exchange of heads: every rank has the whole sequence of some heads.

    Args:
        query: ``[s, b, n, d]``, this rank's tokens; ``n`` is at least the number of ranks, which need not
            divide it.
        key: ``[s, b, g, d]``, ``g`` divides ``n``.
        value: ``[s, b, g, dv]``.
        group: whose ranks share the sequence.
        lengths: tokens of every rank; by default `agreed_lengths`.
        mask: which keys a query sees.
        scale: factor of the scores, by default ``1 / sqrt(d)``.

    Returns:
        ``[s, b, n, dv]``.

    Raises:
        ValueError: there are fewer heads than ranks, or ``lengths`` are not those of the tensors.
    """
    members = Members(group.rank(), inner=group)
    return _attend((query, key, value), group, Grid(1, group.size()), members, lengths, mask, scale)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup,
    lengths: Sequence[int] | None = None,
    *,
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Tensor:
    """Compute attention by a ring: keys and values go round while ranks compute with those at hand.

    Arguments, result and errors are those of `ulysses_attention`, with any number of heads. Under a causal
    mask consecutive parts leave the first ranks less to do.
    """
    members = Members(group.rank(), outer=group)
    return _attend((query, key, value), group, Grid(group.size()), members, lengths, mask, scale)


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup,
    lengths: Sequence[int] | None = None,
    *,
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Tensor:
    """Compute attention by fetching: every rank fetches the keys that its queries see, and no others.

    Arguments, result and errors are those of `ulysses_attention`, with any number of heads.
    """
    grid, members = Grid(group.size(), method=GATHER), Members(group.rank(), outer=group)
    return _attend((query, key, value), group, grid, members, lengths, mask, scale)


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup,
    inner: ProcessGroup,
    outer: ProcessGroup,
    lengths: Sequence[int] | None = None,
    *,
    mask: Mask = Mask(),
    scale: float | None = None,
) -> Tensor:
    """Compute attention by an exchange of heads among neighbours, and a ring among groups of them.

    ``inner`` holds this rank's neighbours, ranks ``u * i`` to ``u * i + u - 1`` of ``group``; ``outer`` the
    ranks of ``group`` with this rank's place in their ``inner``. Further arguments, result and errors are
    those of `ulysses_attention`, with as many heads as ``inner`` has ranks.

    Raises:
        ValueError: the groups are not a grid.
    """
    grid = Grid(outer.size(), inner.size(), RING)
    if grid.ranks != group.size() or grid.place(group.rank()) != (outer.rank(), inner.rank()):
        raise ValueError(
            f"{outer.size()} x {inner.size()} ranks with this one at {outer.rank()}, {inner.rank()} are no "
            f"grid of {group.size()} ranks with this one at {group.rank()}"
        )
    members = Members(group.rank(), inner=inner, outer=outer)
    return _attend((query, key, value), group, grid, members, lengths, mask, scale)


def _attend(
    tensors: tuple[Tensor, Tensor, Tensor],
    group: ProcessGroup,
    grid: Grid,
    members: Members,
    lengths: Sequence[int] | None,
    mask: Mask,
    scale: float | None,
) -> Tensor:
    query = tensors[0]
    local = query.shape[0]
    if lengths is None:
        lengths = agreed_lengths(local, group, query.device)
    if len(lengths) != group.size() or any(tensor.shape[0] != lengths[group.rank()] for tensor in tensors):
        held = ", ".join(str(tensor.shape[0]) for tensor in tensors)
        raise ValueError(
            f"lengths {tuple(lengths)} of {group.size()} ranks give rank {group.rank()} other numbers of "
            f"tokens than its query, key and value have: {held}"
        )
    rule = MaskRule(sum(lengths), mask.causal, tuple(mask.ends), mask.window)
    q, k, v = (tensor.permute(1, 2, 0, 3).contiguous() for tensor in tensors)
    call = CallOptions(scale or 1.0 / math.sqrt(query.shape[-1]))
    output = split_attention(q, k, v, (rule,), members, CPOptions(grid), call, layout=consecutive(lengths))
    return output.permute(2, 0, 1, 3).contiguous()


def consecutive(lengths: Sequence[int]) -> Layout:
    """Return the layout in which ranks own consecutive parts of these lengths; none where a length is 0."""
    shares, start = [], 0
    for length in lengths:
        shares.append(((start, start + length),) if length else ())
        start += length
    return Layout(tuple(shares))
