"""Striped attention (Brandon et al., 2023): every rank owns strips from all over the sequence.

So causal work is even whatever the number of ranks, and a rank that joins later owns late and early tokens
alike. It is a choice of ``--context-parallel-algo`` by its entry point alone.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from mindspeed_cp.engine.layout import Layout, cut, union
from mindspeed_cp.engine.masks import MaskRule
from mindspeed_cp.engine.planners import GATHER, Grid

STRIPS = 4
"""Strips of every rank."""


def striped(size: int, args: Namespace) -> Grid:
    """Arrange ranks so that each fetches the keys which its strips see.

    Args:
        size: ranks of context parallelism.
        args: the parsed arguments.

    Raises:
        ValueError: strips would differ in length.
    """
    if args.seq_length % (STRIPS * size):
        raise ValueError(f"--seq-length {args.seq_length} is no multiple of {STRIPS} strips x {size} ranks")
    return Grid(size, method=GATHER, layout=strips)


def strips(rules: Sequence[MaskRule], ranks: int) -> Layout:
    """Give every rank each ``ranks``-th strip.

    Args:
        rules: what queries see, one rule for all samples or one for each.
        ranks: number of ranks.
    """
    parts = cut(rules[0].length, STRIPS * ranks)
    return Layout(tuple(tuple(union(parts[rank::ranks])) for rank in range(ranks)))
