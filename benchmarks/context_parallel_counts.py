"""Count what split attention sends, keeps and computes, on worlds of processes and on fake tensors.

Nothing here is a time: the numbers are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_cp.engine import counters
from mindspeed_cp.engine.attention import CallOptions, Members, split_attention
from mindspeed_cp.engine.exchange import needed_rows
from mindspeed_cp.engine.layout import Layout, contiguous, zigzag
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, Grid, balanced_layout, imbalance, layout_of
from mindspeed_cp.engine.volume import Sizes, share_of
from mindspeed_cp.options import CPOptions
from mindspeed_megatron.instruments.communication import count_communication
from mindspeed_megatron.instruments.memory import TensorBytes
from mindspeed_testing import run_world

LENGTH, HEADS, KEY_HEADS, WIDTH, BATCH = 512, 8, 2, 16, 2


def algorithms(ranks: int) -> Iterator[tuple[str, Grid, dict[str, Any]]]:
    """Every algorithm with its options."""
    yield "ring", Grid(ranks), {}
    yield "ring, keys kept", Grid(ranks), {"kept": "keys"}
    yield "ring, keys and values kept", Grid(ranks), {"kept": "all"}
    yield "Ulysses", Grid(1, ranks), {}
    yield "Ulysses, keys and values exchanged again", Grid(1, ranks), {"kept": "all"}
    yield "Ulysses, keys gathered", Grid(1, ranks), {"gather_keys": True}
    yield "fetched keys", Grid(ranks, method=GATHER), {}
    yield "balanced", Grid(ranks, method=GATHER, layout="balanced"), {}
    if ranks == 4:
        yield "double ring", Grid(4, window=2), {}
        yield "hybrid", Grid(2, 2), {}
        yield "hybrid, balanced", Grid(2, 2, GATHER, layout="balanced"), {}


def members_of(grid: Grid) -> Members:
    """Groups of this process in a world of the grid's size."""
    rank, found = dist.get_rank(), {}
    for name, lists in (("inner", grid.inner_ranks()), ("outer", grid.outer_ranks())):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks and len(ranks) > 1:
                found[name] = group
    return Members(rank, **found)


def rules_of(name: str, length: int = LENGTH) -> tuple[MaskRule, ...]:
    """Masks by name."""
    return {
        "causal": (MaskRule(length),),
        "full": (MaskRule(length, causal=False),),
        "window": (MaskRule(length, window=length // 8),),
        "documents": (MaskRule(length, ends=packed(length, length // 8, 0)),),
    }[name]


def packed(length: int, mean: int, draw: int) -> tuple[int, ...]:
    """Ends of documents of random lengths around a mean, exponentially distributed."""
    source = random.Random(draw)
    ends, position = [], 0
    while position < length:
        position = min(length, position + max(1, round(source.expovariate(1 / mean))))
        ends.append(position)
    return tuple(ends)


def packed_rule(length: int, mean: int, draw: int) -> MaskRule:
    """The causal mask of such documents."""
    return MaskRule(length, ends=packed(length, mean, draw))


def count_on_one_rank(ranks: int) -> list[tuple[str, str, int, int]]:
    """Bytes that this rank sent, and what the formula says, for every algorithm and mask."""
    dist.init_process_group("gloo")
    sizes = Sizes(BATCH, HEADS, KEY_HEADS, WIDTH, WIDTH, bytes=4)
    found = []
    for name, grid, chosen in algorithms(ranks):
        members = members_of(grid)
        for mask in ("causal", "full", "window", "documents"):
            rules = rules_of(mask)
            local = len(layout_of(grid, rules).positions(members.rank))
            tensors = [
                torch.randn(BATCH, heads, local, WIDTH, requires_grad=True)
                for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            ]
            options = CPOptions(grid)
            with count_communication() as log:
                output = split_attention(*tensors, rules, members, options, CallOptions(0.25, **chosen))
                output.sum().backward()
            expected = share_of(options, rules, sizes, members.rank, **chosen).sent
            found.append((name, mask, int(log.sent_bytes()), expected))
    dist.barrier()
    dist.destroy_process_group()
    return found


def sent_bytes() -> list[dict[str, Any]]:
    """Bytes of all ranks against the formula, worlds of two and four."""
    rows = []
    for ranks in (2, 4):
        for entries in zip(*run_world(count_on_one_rank, ranks, ranks)):
            (name, mask), sent = entries[0][:2], [entry[2] for entry in entries]
            formula = [entry[3] for entry in entries]
            rows.append(
                {
                    "algorithm": name,
                    "mask": mask,
                    "ranks": ranks,
                    "sent": sum(sent),
                    "formula": sum(formula),
                    "exact": sent == formula,
                }
            )
    return rows


def order_on_one_rank(ranks: int) -> list[list[tuple[str, int]]]:
    """Record the calls of a ring, forward and backward, in order."""
    dist.init_process_group("gloo")
    grid = Grid(ranks)
    members, rules = members_of(grid), rules_of("causal")
    local = len(layout_of(grid, rules).positions(members.rank))
    tensors = [torch.randn(1, 2, local, WIDTH, requires_grad=True) for _ in range(3)]
    with counters.counting() as forward:
        output = split_attention(*tensors, rules, members, CPOptions(grid), CallOptions(0.25))
    with counters.counting() as backward:
        output.sum().backward()
    dist.barrier()
    dist.destroy_process_group()
    return [forward.events, backward.events]


def order() -> dict[str, Any]:
    """The transfer of the next block is posted before the one at hand is computed with, on every rank."""
    ranks = 4
    everyone = run_world(order_on_one_rank, ranks, ranks)
    early = all(
        events.index(("post keys", step)) < events.index(("compute", step))
        for both in everyone
        for events in both
        for step in range(ranks - 1)
    )
    forward, backward = everyone[0]
    return {
        "ranks": ranks,
        "posted_before_computed": early,
        "forward": _told(forward),
        "backward": _told(backward),
    }


def _told(events: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{what} {step}" for what, step in events)


MEMORY_RANKS = (2, 4, 8, 16)


def memory(lengths: Sequence[int] = (32768, 131072)) -> list[dict[str, Any]]:
    """Bytes that one rank's attention keeps for backward and has at most, on tensors without data."""
    rows = []
    for length in lengths:
        for ranks in MEMORY_RANKS:
            sides: dict[str, tuple[Grid, dict[str, Any]]] = {
                "ring": (Grid(ranks), {}),
                "Ulysses": (Grid(1, ranks), {}),
                "Ulysses, keys and values exchanged again": (Grid(1, ranks), {"kept": "all"}),
                "fetched keys": (Grid(ranks, method=GATHER), {}),
                "fetched keys, one head at a time": (Grid(ranks, method=GATHER), {"head_groups": 8}),
            }
            if ranks > 2:
                sides["hybrid"] = (Grid(ranks // 2, 2), {})
            for name, (grid, chosen) in sides.items():
                found = _memory(grid, length, chosen)
                rows.append({"algorithm": name, "length": length, "ranks": ranks, **found})
    for row in rows:
        half = [
            other
            for other in rows
            if (other["algorithm"], other["length"], other["ranks"] * 2)
            == (row["algorithm"], row["length"], row["ranks"])
        ]
        for what in ("kept", "peak"):
            row[f"{what}_ratio"] = half[0][what] / row[what] if half else None
    return rows


def _memory(grid: Grid, length: int, chosen: dict[str, Any]) -> dict[str, int]:
    heads, key_heads, width = 32, 8, 128
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.ranks)
    try:
        members = members_of(grid)
        rules = (MaskRule(length),)
        local = layout_of(grid, rules).lengths[0]
        with FakeTensorMode(), TensorBytes() as bytes_of:
            tensors = [
                torch.empty(1, count, local, width, dtype=torch.bfloat16, requires_grad=True)
                for count in (heads, key_heads, key_heads)
            ]
            output = split_attention(
                *tensors, rules, members, CPOptions(grid), CallOptions(width**-0.5, **chosen)
            )
            alive = bytes_of.alive
            output.backward(torch.empty_like(output))
            return {"kept": alive, "peak": bytes_of.peak}
    finally:
        dist.destroy_process_group()


DRAWS = 20


def balance(ranks: int = 8, length: int = 65536) -> list[dict[str, Any]]:
    """Work of the most loaded rank over the mean, in scores: this package's layouts, zigzag and plain."""
    masks: dict[str, list[MaskRule]] = {
        "causal": [MaskRule(length)],
        "full": [MaskRule(length, causal=False)],
        "window 2048": [MaskRule(length, window=2047)],
        "window 8192": [MaskRule(length, window=8191)],
        "prefix of half": [MaskRule(length, prefix=length // 2)],
        **{
            f"documents of {mean}": [packed_rule(length, mean, draw) for draw in range(DRAWS)]
            for mean in (1024, 2048, 8192)
        },
    }
    rows = []
    for name, rules in masks.items():
        chosen = [_chosen(rule, ranks) for rule in rules]
        sides = {
            "balanced": chosen,
            "zigzag": [zigzag(length, ranks)] * len(rules),
            "plain": [contiguous(length, ranks)] * len(rules),
        }
        row: dict[str, Any] = {"mask": name, "ranks": ranks, "length": length, "draws": len(rules)}
        for side, layouts in sides.items():
            found = [imbalance(layout, [rule]) for layout, rule in zip(layouts, rules)]
            row[side], row[f"{side}_worst"] = sum(found) / len(found), max(found)
        shares = [_fetched_share(layout, rule) for layout, rule in zip(chosen, rules)]
        row["keys_share"], row["keys_share_worst"] = sum(shares) / len(shares), max(shares)
        rows.append(row)
    return rows


def _chosen(rule: MaskRule, ranks: int) -> Layout:
    if rule.causal:
        return balanced_layout((rule,), ranks)
    return contiguous(rule.length, ranks)


def _fetched_share(layout: Layout, rule: MaskRule) -> float:
    """Keys that are fetched from other ranks, as a part of what rings would send."""
    foreign = 0
    for rank, needed in enumerate(needed_rows(layout, [rule])):
        own = layout.shares[rank]
        foreign += sum(end - start for start, end in needed)
        foreign -= sum(max(0, min(e, d) - max(s, c)) for s, e in needed for c, d in own)
    return foreign / ((layout.ranks - 1) * rule.length)


def packed_share(ranks: int = 8, length: int = 65536, mean: int = 2048) -> list[dict[str, Any]]:
    """Bytes of fetched keys on packed documents against a ring's, with all ranks busy alike."""
    rows = []
    for chunks in (0, 1, 2, 4, 8):
        shares, loads = [], []
        for draw in range(DRAWS):
            rule = packed_rule(length, mean, draw)
            layout = balanced_layout((rule,), ranks, chunks)
            shares.append(_fetched_share(layout, rule))
            loads.append(imbalance(layout, [rule]))
        rows.append(
            {
                "ranks": ranks,
                "mean": mean,
                "chunks_per_rank": chunks or "as few as balance",
                "share": sum(shares) / DRAWS,
                "share_worst": max(shares),
                "balance": sum(loads) / DRAWS,
                "balance_worst": max(loads),
            }
        )
    return rows
