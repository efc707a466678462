"""Attention over a sequence that is split over ranks: the one entry to the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_cp.engine import counters
from mindspeed_cp.engine.block import Work
from mindspeed_cp.engine.exchange import Exchange, exchange, needed_rows
from mindspeed_cp.engine.gather import GatheredAttention, GatherPlan
from mindspeed_cp.engine.head_plan import HeadPlan, head_plan
from mindspeed_cp.engine.heads import to_heads, to_positions, to_whole
from mindspeed_cp.engine.layout import Layout
from mindspeed_cp.engine.local import LocalAttention, work_with
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, layout_of, outer_layout
from mindspeed_cp.engine.ring import RingAttention, RingPlan
from mindspeed_cp.engine.ring_table import ring_table
from mindspeed_cp.engine.scores import Dropout, Scores
from mindspeed_cp.options import CPOptions


@dataclass(frozen=True)
class Members:
    """The groups of one rank.

    Attributes:
        rank: within context parallelism.
        inner: ranks that exchange heads; None where there is one.
        outer: ranks that exchange keys; None where there is one.
        across: a group of its own for transfers across windows of a double ring.
        second: a second group of the outer ranks, for what those with an odd place send round the ring.
    """

    rank: int
    inner: ProcessGroup | None = None
    outer: ProcessGroup | None = None
    across: ProcessGroup | None = None
    second: ProcessGroup | None = None


@dataclass(frozen=True)
class CallOptions:
    """The options of one call of attention, beside those of the run.

    Attributes:
        scale: factor of the scores.
        first_head: global number of the first query head here (tensor parallelism splits heads).
        slopes: ``[n]`` float32, bias ``-slope * |distance|`` of each query head here.
        root: the bias takes the root of the distance.
        dropout: of attention weights.
        sink: ``[n]``, a further score of every row, by query head here, whose value is zero.
        kept: what a ring keeps of the blocks for backward: ``none`` but the last, ``keys``, or ``all``. Where
            heads alone are exchanged: what is kept as it was before the exchange and exchanged again,
            ``none``, ``keys``, or ``all``, which is keys and values.
    """

    scale: float
    first_head: int = 0
    slopes: Tensor | None = None
    dropout: Dropout | None = None
    sink: Tensor | None = None
    kept: str = "none"
    root: bool = False


def split_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rules: Sequence[MaskRule],
    members: Members,
    options: CPOptions,
    call: CallOptions,
    layout_rules: Sequence[MaskRule] | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks.

    Args:
        query: ``[b, n, s, d]``, this rank's positions as `mindspeed_cp.engine.planners.layout_of` gives them.
        key: ``[b, g, s, d]``, ``g`` divides ``n``.
        value: ``[b, g, s, dv]``.
        rules: which scores count, one rule for each sample, or one for all.
        members: this rank's groups.
        options: how ranks are arranged, and how they exchange.
        call: scale, bias, dropout, what is kept.
        layout_rules: the rules that the layout was made for, where a layer has others (a window of its own).
        layout: what every rank owns, where that is given and not made for rules.

    Returns:
        ``[b, n, s, dv]``.
    """
    rules, grid = tuple(rules), options.grid
    layout_rules = rules if layout_rules is None else tuple(layout_rules)
    if layout is None:
        layout, outer = layout_of(grid, layout_rules), outer_layout(grid, layout_rules)
    else:
        outer = joined_shares(layout, grid.inner)
    place, turn = grid.place(members.rank)
    if counters.active is not None:
        counters.active.tokens += query.shape[0] * query.shape[2]
    heads = range(call.first_head, call.first_head + query.shape[1])
    slopes, sink = call.slopes, call.sink
    saved_tensors: AbstractContextManager[object] = nullcontext()
    if grid.inner > 1:
        assert members.inner is not None
        lengths = [layout.lengths[place * grid.inner + i] for i in range(grid.inner)]
        plan = head_plan(query.shape[1], key.shape[1], grid.inner, turn)
        block = plan.queries[turn]
        query = to_heads(query, plan.queries, lengths, members.inner)
        exchanged = _keys_exchange(plan, turn, lengths, members.inner, options)
        unexchanged, key, value = (key, value), exchanged(key), exchanged(value)
        if grid.outer == 1 and call.kept != "none":
            again = zip((key, value)[: 1 + (call.kept == "all")], unexchanged)
            saved_tensors = keep_unexchanged([(there, here.detach()) for there, here in again], exchanged)
        heads = heads[block.start : block.stop]
        slopes = None if slopes is None else slopes[block.start : block.stop]
        sink = None if sink is None else sink[block.start : block.stop]
    numbers, scores = torch.arange(heads.start, heads.stop), []
    for samples, rule in by_rule(rules, query.shape[0]):
        dropout = call.dropout
        if dropout is not None:
            dropout = replace(dropout, first_sample=dropout.first_sample + samples.start)
        about = Scores(call.scale, rule, numbers, slopes, dropout, options.kernel_layout, call.root)
        scores.append((samples, about))
    with saved_tensors:
        output = _outer_attention(query, key, value, sink, outer, scores, place, members, options, call.kept)
    if grid.inner > 1:
        assert members.inner is not None
        output = to_positions(output, plan.queries, lengths, members.inner)
    return output


def joined_shares(layout: Layout, inner: int) -> Layout:
    """Return the layout of outer ranks, whose shares are those of their inner ranks behind one another."""
    shares = [layout.shares[start : start + inner] for start in range(0, layout.ranks, inner)]
    return Layout(tuple(tuple(part for share in group for part in share) for group in shares))


def _keys_exchange(
    plan: HeadPlan, turn: int, lengths: Sequence[int], group: ProcessGroup, options: CPOptions
) -> Callable[[Tensor], Tensor]:
    """Return the function that brings keys, or values, to the ranks that have their heads."""

    def exchanged(tensor: Tensor) -> Tensor:
        if options.gather_keys:
            block = plan.keys[turn]
            whole = to_whole(tensor, lengths, group, wide=options.wide_gradients)
            tensor = whole[:, block.start : block.stop]
        else:
            tensor = to_heads(tensor, plan.keys, lengths, group)
        if plan.expand:
            tensor = tensor.index_select(1, torch.tensor(plan.expand, device=tensor.device))
        return tensor

    return exchanged


def keep_unexchanged(
    tensors: Sequence[tuple[Tensor, Tensor]], exchange_again: Callable[[Tensor], Tensor]
) -> AbstractContextManager[object]:
    """Let autograd keep what a tensor was exchanged from, and exchange it again when backward needs it.

    Args:
        tensors: exchanged tensors, each with the one it was made of.
        exchange_again: how; collective, and called in the same order by all ranks.
    """
    unexchanged = {(_storage(there), there.shape): here for there, here in tensors}

    def pack(tensor: Tensor) -> tuple[bool, Tensor]:
        here = unexchanged.get((_storage(tensor), tensor.shape))
        return (False, tensor) if here is None else (True, here)

    def unpack(packed: tuple[bool, Tensor]) -> Tensor:
        again, tensor = packed
        if not again:
            return tensor
        with torch.no_grad():
            return exchange_again(tensor)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def by_rule(rules: Sequence[MaskRule], samples: int) -> list[tuple[slice, MaskRule]]:
    """Group samples by their rule; a single rule is for all of them."""
    if len(set(rules)) == 1:
        return [(slice(0, samples), rules[0])]
    if len(rules) != samples:
        raise ValueError(f"{len(rules)} mask rules for {samples} samples")
    return [(slice(index, index + 1), rule) for index, rule in enumerate(rules)]


def _outer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    layout: Layout,
    scores: Sequence[tuple[slice, Scores]],
    place: int,
    members: Members,
    options: CPOptions,
    kept: str,
) -> Tensor:
    grid, chunks = options.grid, layout.chunks(place)
    if grid.outer == 1:
        work = work_with(scores, chunks, chunks)
        _count(work)
        return _apply(LocalAttention, query, key, value, work, sink)
    assert members.outer is not None
    if grid.method == GATHER:
        exchanged_keys = _key_exchange(layout, place, tuple(of.rule for _, of in scores))
        work = work_with(scores, chunks, exchanged_keys.chunks)
        _count(work)
        plan = GatherPlan(exchanged_keys, work, members.outer, options)
        return _apply(GatheredAttention, query, key, value, plan, sink)
    ring = RingPlan(
        ring_table(grid.outer, grid.window),
        place,
        layout.lengths,
        tuple(work_with(scores, chunks, layout.chunks(block)) for block in range(layout.ranks)),
        members.outer,
        options,
        members.across,
        members.second,
        kept,
    )
    _count(*ring.work)
    return _apply(RingAttention, query, key, value, ring, sink)


def _apply(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    output: Tensor = function.apply(*inputs)
    return output


def _count(*works: Work) -> None:
    if counters.active is not None:
        for work in works:
            counters.active.add_work(work)


@lru_cache(maxsize=64)
def _key_exchange(layout: Layout, place: int, rules: tuple[MaskRule, ...]) -> Exchange:
    """Return the exchange of keys, made once for all layers."""
    return exchange(layout, place, needed_rows(layout, rules))
