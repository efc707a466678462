"""Rows that a CPU works on at a time, so few that intermediate results stay in its cache."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from mindspeed_megatron.equal_blocks import run_blocks


def rows_at_a_time(x: Tensor, elements: int) -> int:
    """Return how many entries of the first dimension have ``elements`` elements together, at least one.

    Args:
        x: at least one dimension.
        elements: that fit into the cache.
    """
    return min(max(1, elements // max(1, x[:1].numel())), max(1, x.shape[0]))


def row_blocks(rows: int, step: int) -> Iterable[slice]:
    """Return slices of ``step`` rows, the last one of what is left.

    For results that are written into memory that is there before: in a dry run some stand for the others.
    """
    blocks = [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
    return run_blocks(blocks, lambda block: block.stop - block.start)
