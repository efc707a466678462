"""From sizes and mask rules to layouts and plans: every algorithm of context parallelism as a choice of
parts.

The ranks form a grid of ``outer`` x ``inner``: neighbours of an inner group exchange heads for positions, the
outer ranks with one inner place exchange keys, by a ring or by fetching what they need. Ulysses is all inner,
a ring all outer, the hybrid both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from mindspeed_cp.engine.exchange import needed_rows
from mindspeed_cp.engine.layout import (
    Interval,
    Layout,
    assign,
    contiguous,
    cut,
    documents_zigzag,
    nested,
    union,
    zigzag,
)
from mindspeed_cp.engine.masks import MaskRule, running_sums
from mindspeed_cp.engine.tiles import TILE

RING, GATHER = "ring", "gather"
MOST_UNEVEN = 1.05
"""Largest work of a rank over the mean that a balanced layout is content with."""
_CHUNKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Grid:
    """An arrangement of the ranks of context parallelism.

    Attributes:
        outer: ranks that exchange keys.
        inner: neighbours that exchange heads.
        method: `RING` or `GATHER`; without meaning for a single outer rank.
        window: ranks of an inner ring of a double ring.
        layout: ``auto``, ``zigzag``, ``contiguous``, ``balanced`` or ``doc_zigzag``; or a function from the
            rules of all samples and the number of outer ranks to their layout.
        chunks: per rank in a balanced layout; 0 chooses.
        regroup: a balanced layout may bring rows of a given matrix that see the same onto one rank.
        tile: work under a given matrix is counted in tiles of this size.
    """

    outer: int
    inner: int = 1
    method: str = RING
    window: int = 1
    layout: str | Callable[[tuple[MaskRule, ...], int], Layout] = "auto"
    chunks: int = 0
    regroup: bool = False
    tile: int = TILE

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.outer * self.inner

    def place(self, rank: int) -> tuple[int, int]:
        """Return the outer and the inner place of a rank; inner neighbours are adjacent ranks."""
        return divmod(rank, self.inner)

    def inner_ranks(self) -> list[list[int]]:
        """Return the ranks that exchange heads."""
        return [list(range(start, start + self.inner)) for start in range(0, self.ranks, self.inner)]

    def outer_ranks(self) -> list[list[int]]:
        """Return the ranks that exchange keys."""
        return [list(range(place, self.ranks, self.inner)) for place in range(self.inner)]


@lru_cache(maxsize=64)
def outer_layout(grid: Grid, rules: tuple[MaskRule, ...]) -> Layout:
    """Return what every outer rank owns, for samples with these rules.

    Raises:
        ValueError: the layout that was asked for does not suit the rules.
    """
    rule = rules[0]
    kind = grid.layout
    if not isinstance(kind, str):
        return _checked(kind(rules, grid.outer), rule.length, grid.outer)
    if kind == "auto":
        kind = _choose_layout(grid, rules)
    if grid.outer == 1 or kind == "contiguous":
        return contiguous(rule.length, grid.outer)
    if kind == "zigzag":
        return zigzag(rule.length, grid.outer)
    if kind == "doc_zigzag":
        if len(set(rules)) > 1:
            raise ValueError(
                "--cp-layout doc_zigzag needs the same documents in every sample of a micro-batch"
            )
        return documents_zigzag(rule.ends or (rule.length,), grid.outer)
    return balanced_layout(rules, grid.outer, grid.chunks, regroup=grid.regroup, tile=grid.tile)


def _checked(layout: Layout, length: int, ranks: int) -> Layout:
    if (layout.length, layout.ranks) != (length, ranks):
        raise ValueError(
            f"a layout of {length} positions over {ranks} ranks was asked for, got one of {layout.length} "
            f"over {layout.ranks}"
        )
    return layout


def _choose_layout(grid: Grid, rules: Sequence[MaskRule]) -> str:
    """Choose a layout: zigzag balances a plain causal mask, consecutive parts a full one."""
    plain = all(not rule.ends and rule.window is None and rule.matrix is None for rule in rules)
    if plain and all(rule.causal and not rule.prefix for rule in rules):
        return "zigzag"
    if plain and not any(rule.causal for rule in rules):
        return "contiguous"
    # A ring goes in step: fewer, larger chunks keep the steps alike.
    return "balanced" if grid.method == GATHER else "zigzag"


def balanced_layout(
    rules: Sequence[MaskRule],
    ranks: int,
    chunks_per_rank: int = 0,
    *,
    regroup: bool = False,
    tile: int = TILE,
) -> Layout:
    """Return the layout with the fewest chunks in which no rank has 5 % more work than the mean.

    Args:
        rules: of all samples.
        ranks: number of ranks.
        chunks_per_rank: chunks of each rank; 0 tries 1, 2, 4, 8 and 16.
        regroup: under a given matrix, also try tiles that see the same beside one another, and take them
            where more than a tenth of the keys need not travel.
        tile: under a given matrix work is counted in whole tiles of this size, 1 counts scores.
    """
    length = rules[0].length
    work = sum((rule.work(tile) for rule in rules), np.zeros(length, dtype=np.int64))
    ordered = _deal([(0, length)], work, ranks, chunks_per_rank)
    matrices = [rule.matrix is not None for rule in rules]
    if not (regroup and all(matrices) and len(set(rules)) == 1):
        return ordered
    tiles = [(start, min(start + TILE, length)) for start in range(0, length, TILE)]
    grouped = _deal([tiles[place] for place in rules[0].tiles.groups()], work, ranks, chunks_per_rank)
    fewer = travelling_keys(grouped, rules) < 0.9 * travelling_keys(ordered, rules)
    return grouped if fewer and _load(grouped, work) <= max(MOST_UNEVEN, _load(ordered, work)) else ordered


def _deal(order: Sequence[Interval], work: npt.NDArray[np.int64], ranks: int, chunks_per_rank: int) -> Layout:
    """Deal out equal chunks of a sequence in some order, as few as balance, or those that balance best."""
    length = len(work)
    running = running_sums(np.concatenate([work[slice(*interval)] for interval in order]))
    most = max(1, length // ranks)
    best: tuple[float, list[Interval], list[list[int]]] | None = None
    for count in (chunks_per_rank,) if chunks_per_rank else _CHUNKS:
        if best is not None and count > most:
            break
        chunks = cut(length, ranks * count)
        borders = np.array([chunk[0] for chunk in chunks] + [length])
        weights = np.diff(running[borders])
        owned = assign(weights.tolist(), ranks)
        loads = [int(weights[share].sum()) for share in owned]
        uneven = max(loads) * ranks / max(1, sum(loads))
        if best is None or uneven < best[0]:
            best = uneven, chunks, owned
        if uneven <= MOST_UNEVEN:
            break
    assert best is not None
    _, chunks, owned = best
    return Layout(tuple(tuple(union(_positions_of(order, [chunks[i] for i in share]))) for share in owned))


def _positions_of(order: Sequence[Interval], chunks: Sequence[Interval]) -> list[Interval]:
    """Return the positions of chunks of a sequence that consists of intervals in some order."""
    if len(order) == 1:
        return list(chunks)
    found, starts = [], np.cumsum([0, *(end - start for start, end in order)])
    for low, high in chunks:
        first, last = np.searchsorted(starts, (low, high - 1), side="right") - 1
        for index in range(first, last + 1):
            start, offset = order[index][0], int(starts[index])
            end = order[index][1]
            found.append((start + max(low - offset, 0), min(start + high - offset, end)))
    return found


def _load(layout: Layout, work: npt.NDArray[np.int64]) -> float:
    loads = [sum(int(work[slice(*interval)].sum()) for interval in share) for share in layout.shares]
    return max(loads) * len(loads) / max(1, sum(loads))


def imbalance(layout: Layout, rules: Sequence[MaskRule]) -> float:
    """Return the work of the most loaded rank over the mean, in scores."""
    return _load(layout, sum((rule.row_scores for rule in rules), np.zeros(layout.length, dtype=np.int64)))


def travelling_keys(layout: Layout, rules: Sequence[MaskRule]) -> int:
    """Count the keys that ranks fetch from others, of all ranks; a ring moves ``(ranks - 1) * length``."""
    total = 0
    for share, needed in zip(layout.shares, needed_rows(layout, rules)):
        both = union([*needed, *share])
        total += sum(end - start for start, end in both) - sum(end - start for start, end in share)
    return total


@lru_cache(maxsize=64)
def layout_of(grid: Grid, rules: tuple[MaskRule, ...]) -> Layout:
    """Return what every rank owns: its inner part of its outer share."""
    outer = outer_layout(grid, rules)
    return outer if grid.inner == 1 else nested(outer, grid.inner)
