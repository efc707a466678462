"""From sizes and mask rules to layouts and plans: every algorithm of context parallelism as a choice of
parts.

The ranks form a grid of ``outer`` x ``inner``: neighbours of an inner group exchange heads for positions, the
outer ranks with one inner place exchange keys, by a ring or by fetching what they need. Ulysses is all inner,
a ring all outer, the hybrid both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from mindspeed_cp.engine.layout import Layout, balanced, contiguous, documents_zigzag, nested, zigzag
from mindspeed_cp.engine.masks import MaskRule

RING, GATHER = "ring", "gather"
LOCAL = "local"
MOST_UNEVEN = 1.05
"""Largest work of a rank over the mean that a balanced layout is content with."""


@dataclass(frozen=True)
class Grid:
    """How the ranks of context parallelism are arranged.

    Attributes:
        outer: ranks that exchange keys.
        inner: neighbours that exchange heads.
        method: `RING`, `GATHER`, or `LOCAL` with a single outer rank.
        window: ranks of an inner ring of a double ring.
        layout: ``auto``, ``zigzag``, ``contiguous``, ``balanced`` or ``doc_zigzag``.
        chunks: per rank in a balanced layout; 0 chooses.
    """

    outer: int
    inner: int = 1
    method: str = RING
    window: int = 1
    layout: str = "auto"
    chunks: int = 0

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.outer * self.inner

    def place(self, rank: int) -> tuple[int, int]:
        """Outer and inner place of a rank; inner neighbours are adjacent ranks."""
        return divmod(rank, self.inner)

    def inner_ranks(self) -> list[list[int]]:
        """Ranks that exchange heads."""
        return [list(range(start, start + self.inner)) for start in range(0, self.ranks, self.inner)]

    def outer_ranks(self) -> list[list[int]]:
        """Ranks that exchange keys."""
        return [list(range(place, self.ranks, self.inner)) for place in range(self.inner)]


@lru_cache(maxsize=64)
def outer_layout(grid: Grid, rules: tuple[MaskRule, ...]) -> Layout:
    """What every outer rank owns, for samples with these rules.

    Raises:
        ValueError: the layout that was asked for does not suit the rules.
    """
    rule = rules[0]
    kind = grid.layout
    if kind == "auto":
        kind = _suitable(grid, rules)
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
    return balanced_layout(rules, grid.outer, grid.chunks)


def _suitable(grid: Grid, rules: Sequence[MaskRule]) -> str:
    """Zigzag is balanced for a plain causal mask, consecutive parts for a full one."""
    plain = all(not rule.ends and rule.window is None and rule.matrix is None for rule in rules)
    if plain and all(rule.causal and not rule.prefix for rule in rules):
        return "zigzag"
    if plain and not any(rule.causal for rule in rules):
        return "contiguous"
    # A ring goes in step: fewer, larger chunks keep the steps alike.
    return "balanced" if grid.method == GATHER else "zigzag"


def balanced_layout(rules: Sequence[MaskRule], ranks: int, chunks_per_rank: int = 0) -> Layout:
    """The layout with the fewest chunks whose most loaded rank has at most 5 % more work than the mean.

    Args:
        rules: of all samples.
        ranks: number of ranks.
        chunks_per_rank: chunks of each rank; 0 tries 2, 4, 8 and 16.
    """
    length = rules[0].length
    best: Layout | None = None
    for count in (chunks_per_rank,) if chunks_per_rank else (2, 4, 8, 16):
        chunks = contiguous(length, ranks * count).shares
        work = [sum(rule.pairs(share[0]) for rule in rules) for share in chunks]
        best = balanced(work, length, ranks, count)
        if imbalance(best, rules) <= MOST_UNEVEN:
            break
    assert best is not None
    return best


def imbalance(layout: Layout, rules: Sequence[MaskRule]) -> float:
    """Work of the most loaded rank over the mean, in scores."""
    work = [sum(rule.pairs(interval) for rule in rules for interval in share) for share in layout.shares]
    return max(work) * len(work) / max(1, sum(work))


@lru_cache(maxsize=64)
def layout_of(grid: Grid, rules: tuple[MaskRule, ...]) -> Layout:
    """What every rank owns: its inner part of its outer share."""
    outer = outer_layout(grid, rules)
    return outer if grid.inner == 1 else nested(outer, grid.inner)
