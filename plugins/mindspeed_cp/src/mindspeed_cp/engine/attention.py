"""Attention over a sequence that is split over ranks: the one entry to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_cp.engine.block import Dropout, Scores
from mindspeed_cp.engine.gather import Exchange, GatheredAttention, GatherPlan, exchange, needed_rows
from mindspeed_cp.engine.heads import head_plan, to_heads, to_positions
from mindspeed_cp.engine.layout import Layout
from mindspeed_cp.engine.local import LocalAttention, work_with
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, Grid, layout_of, outer_layout
from mindspeed_cp.engine.ring import RingAttention, RingPlan, ring_table


@dataclass(frozen=True)
class Members:
    """The groups of one rank.

    Attributes:
        rank: within context parallelism.
        inner: ranks that exchange heads; None where there is one.
        outer: ranks that exchange keys; None where there is one.
        across: a group of its own for transfers across windows of a double ring.
    """

    rank: int
    inner: ProcessGroup | None = None
    outer: ProcessGroup | None = None
    across: ProcessGroup | None = None


@dataclass(frozen=True)
class Options:
    """How attention is computed.

    Attributes:
        scale: factor of the scores.
        first_head: global number of the first query head here (tensor parallelism splits heads).
        slopes: ``[n]`` float32, bias ``-slope * |distance|`` of each query head here.
        dropout: of attention weights.
        kept: what a ring keeps of the blocks for backward: ``none``, ``keys`` or ``all``.
        wide_gradients: gradients of keys and values travel in float32.
    """

    scale: float
    first_head: int = 0
    slopes: Tensor | None = None
    dropout: Dropout | None = None
    kept: str = "none"
    wide_gradients: bool = True


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Sequence[MaskRule],
    grid: Grid,
    members: Members,
    options: Options,
    laid_out: Sequence[MaskRule] | None = None,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        query: ``[b, n, s, d]``, this rank's positions as `mindspeed_cp.engine.planners.layout_of` gives them.
        key: ``[b, g, s, d]``, ``g`` divides ``n``.
        value: ``[b, g, s, dv]``.
        rules: which scores count, one rule for each sample, or one for all.
        grid: how ranks are arranged.
        members: this rank's groups.
        options: scale, bias, dropout, what is kept.
        laid_out: the rules that the layout was made for, where a layer has others (a window of its own).

    Returns:
        ``[b, n, s, dv]``.
    """
    rules = tuple(rules)
    laid = rules if laid_out is None else tuple(laid_out)
    outer = outer_layout(grid, laid)
    place, turn = grid.place(members.rank)
    heads = range(options.first_head, options.first_head + query.shape[1])
    slopes = options.slopes
    if grid.inner > 1:
        assert members.inner is not None
        layout = layout_of(grid, laid)
        lengths = [layout.lengths[place * grid.inner + i] for i in range(grid.inner)]
        plan = head_plan(query.shape[1], key.shape[1], grid.inner, turn)
        mine = plan.queries[turn]
        query = to_heads(query, plan.queries, lengths, members.inner)
        key = to_heads(key, plan.keys, lengths, members.inner)
        value = to_heads(value, plan.keys, lengths, members.inner)
        if plan.expand:
            index = torch.tensor(plan.expand, device=key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
        heads = heads[mine.start : mine.stop]
        slopes = None if slopes is None else slopes[mine.start : mine.stop]
    pairs = by_rule(rules, query.shape[0])
    scores = [
        Scores(
            options.scale,
            rule,
            heads=torch.arange(heads.start, heads.stop),
            slopes=slopes,
            dropout=_for(samples, options.dropout),
        )
        for samples, rule in pairs
    ]
    output = _outer(query, key, value, outer, pairs, scores, grid, place, members, options)
    if grid.inner > 1:
        assert members.inner is not None
        output = to_positions(output, plan.queries, lengths, members.inner)
    return output


def by_rule(rules: Sequence[MaskRule], samples: int) -> list[tuple[slice, MaskRule]]:
    """Samples with one rule together; a single rule is for all of them."""
    if len(set(rules)) == 1:
        return [(slice(0, samples), rules[0])]
    if len(rules) != samples:
        raise ValueError(f"{len(rules)} mask rules for {samples} samples")
    return [(slice(index, index + 1), rule) for index, rule in enumerate(rules)]


def _for(samples: slice, dropout: Dropout | None) -> Dropout | None:
    if dropout is None:
        return None
    return Dropout(dropout.probability, dropout.seed, dropout.first_sample + samples.start)


def _outer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    pairs: Sequence[tuple[slice, MaskRule]],
    scores: Sequence[Scores],
    grid: Grid,
    place: int,
    members: Members,
    options: Options,
) -> Tensor:
    chunks = layout.chunks(place)
    if grid.outer == 1:
        work = work_with(pairs, scores, chunks, chunks)
        result: Tensor = LocalAttention.apply(query, key, value, work)
        return result
    assert members.outer is not None
    if grid.method == GATHER:
        moved = _moved(layout, place, tuple(rule for _, rule in pairs))
        work = work_with(pairs, scores, chunks, moved.chunks)
        plan = GatherPlan(moved, work, members.outer, options.wide_gradients)
        gathered: Tensor = GatheredAttention.apply(query, key, value, plan)
        return gathered
    ring = RingPlan(
        ring_table(grid.outer, grid.window),
        place,
        layout.lengths,
        tuple(work_with(pairs, scores, chunks, layout.chunks(block)) for block in range(layout.ranks)),
        members.outer,
        members.across,
        options.kept,
        options.wide_gradients,
    )
    travelled: Tensor = RingAttention.apply(query, key, value, ring)
    return travelled


@lru_cache(maxsize=64)
def _moved(layout: Layout, place: int, rules: tuple[MaskRule, ...]) -> Exchange:
    """The exchange of keys, made once for all layers."""
    return exchange(layout, place, needed_rows(layout, rules))
