"""Number of rows that a CPU works on at a time, so that intermediate results stay in its cache."""

from __future__ import annotations

from torch import Tensor


def rows_at_a_time(x: Tensor, elements: int) -> int:
    """Return how many entries of the first dimension have so many elements together, at least one.

    Args:
        x: of any rank.
        elements: that fit, together with what is computed from them.
    """
    return min(max(1, elements // max(1, x[:1].numel())), max(1, x.shape[0]))
