"""Interleaved 1F1B, and nano-pipe, which leaves some of its weight gradients to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindspeed_pp.actions import A, Action, B, F, W
from mindspeed_pp.rule import Context, schedule


@schedule("1f1b", summary="one forward, one backward pass by turns, as megatron-core without interleaving")
def one_forward_one_backward(c: Context) -> Iterator[list[Action]]:
    """Yield megatron-core's order (PipeDream-flush, arXiv 2006.09503)."""
    for r in range(c.p):
        ahead = min(c.p - r - 1, c.m)
        steady = [x for i in range(c.m - ahead) for x in (F(r, ahead + i), A(r, i))]
        yield [F(r, i) for i in range(ahead)] + steady + [A(r, i) for i in range(c.m - ahead, c.m)]


def rounds(c: Context) -> list[tuple[int, int]]:
    """Return micro-batch and chunk of every forward pass of a rank: ``p`` micro-batches a chunk at a time."""
    return [
        (i, chunk)
        for first in range(0, c.m, c.p)
        for chunk in range(c.v)
        for i in range(first, min(first + c.p, c.m))
    ]


def _interleaved(c: Context, splits: Callable[[int, int], bool]) -> Iterator[list[Action]]:
    table, total = rounds(c), c.m * c.v
    for r in range(c.p):
        ahead = min((c.p - r - 1) * 2 + (c.v - 1) * c.p, total)
        order: list[Action] = []
        later: list[Action] = []

        def backward(k: int, r: int = r, order: list[Action] = order, later: list[Action] = later) -> None:
            i, chunk = table[k]
            stage = (c.v - 1 - chunk) * c.p + r
            if splits(r, k):
                order.append(B(stage, i))
                later.append(W(stage, i))
            else:
                order.append(A(stage, i))

        for k in range(total):
            i, chunk = table[k]
            order.append(F(chunk * c.p + r, i))
            if k >= ahead:
                backward(k - ahead)
        for k in range(total - ahead, total):
            backward(k)
        yield order + later


@schedule("interleaved", chunks=None, whole_rounds=True, least=lambda p: p)
def interleaved(c: Context) -> Iterator[list[Action]]:
    """Several model chunks on each rank, as megatron-core interleaves them."""
    yield from _interleaved(c, lambda r, k: False)


@schedule("nanopipe", chunks=None, splits=True, whole_rounds=True, least=lambda p: p)
def nanopipe(c: Context) -> Iterator[list[Action]]:
    """Interleaved, with the first weight gradients of late ranks at the end (MindSpeed's nano-pipe)."""
    yield from _interleaved(c, lambda r, k: k < 2 * r)
