"""Zero-bubble schedules on the usual placement: weight gradients fill what used to be idle.

Source: "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), H1 with the memory of 1F1B and H2 with twice of
it; ``zbi`` is H1's idea over several chunks.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_pp.actions import Action, B, F, W
from mindspeed_pp.rule import Context, schedule
from mindspeed_pp.schedules.interleaved import rounds


def _handcrafted(c: Context, stretch: int) -> Iterator[list[Action]]:
    for r in range(c.p):
        ahead, lag = min(stretch * (c.p - r) - (stretch - 1), c.m), stretch * r
        order = [F(r, i) for i in range(ahead)]
        for i in range(c.m):
            order.append(B(r, i))
            if i >= lag:
                order.append(W(r, i - lag))
            if ahead + i < c.m:
                order.append(F(r, ahead + i))
        yield order + [W(r, i) for i in range(max(0, c.m - lag), c.m)]


@schedule("zb-h1", splits=True)
def zb_h1(c: Context) -> Iterator[list[Action]]:
    """Weight gradients in the bubble of 1F1B, with its memory."""
    yield from _handcrafted(c, 1)


@schedule("zb-h2", splits=True)
def zb_h2(c: Context) -> Iterator[list[Action]]:
    """No rank idles between its first and last action, with twice the memory of 1F1B."""
    yield from _handcrafted(c, 2)


@schedule("zbi", chunks=None, splits=True, whole_rounds=True, least=lambda p: p)
def zbi(c: Context) -> Iterator[list[Action]]:
    """Interleaved, with weight gradients in its bubble and the memory of 1F1B."""
    table, total = rounds(c), c.m * c.v
    for r in range(c.p):
        ahead = min((c.v - 1) * c.p + c.p - 1 - r, total)
        order = [F(chunk * c.p + r, i) for i, chunk in table[:ahead]]

        def placed(k: int, r: int = r) -> tuple[int, int]:
            i, chunk = table[k]
            return (c.v - 1 - chunk) * c.p + r, i

        for k in range(total):
            if k + ahead < total:
                i, chunk = table[k + ahead]
                order.append(F(chunk * c.p + r, i))
            order.append(B(*placed(k)))
            if k >= r:
                order.append(W(*placed(k - r)))
        yield order + [W(*placed(k)) for k in range(max(0, total - r), total)]
