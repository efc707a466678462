"""Number of rows that a CPU works on at a time, so that intermediate results stay in its cache."""

from __future__ import annotations

from torch import Tensor


def rows_at_a_time(x: Tensor, elements: int) -> int:
    """Return how many entries of the first dimension have ``elements`` elements together, at least one."""
    return min(max(1, elements // max(1, x[:1].numel())), max(1, x.shape[0]))
