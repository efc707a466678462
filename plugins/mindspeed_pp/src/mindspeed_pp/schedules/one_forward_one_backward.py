"""1F1B: as many forward passes as ranks follow, then one forward and one backward pass by turns."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_pp.actions import A, Action, F
from mindspeed_pp.rule import Context, schedule


@schedule("1f1b", summary="one forward, one backward pass by turns, as megatron-core without interleaving")
def one_forward_one_backward(c: Context) -> Iterator[list[Action]]:
    """Yield megatron-core's order (PipeDream-flush, arXiv 2006.09503)."""
    for r in range(c.p):
        ahead = min(c.p - r - 1, c.m)
        steady = [x for i in range(c.m - ahead) for x in (F(r, ahead + i), A(r, i))]
        yield [F(r, i) for i in range(ahead)] + steady + [A(r, i) for i in range(c.m - ahead, c.m)]
