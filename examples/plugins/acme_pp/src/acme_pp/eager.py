"""1F1B that runs ahead: twice as many forward passes first, so that messages travel under computation."""

from collections.abc import Iterator

from mindspeed_pp import A, Action, Context, F, schedule


@schedule("eager-1f1b")
def eager(c: Context) -> Iterator[list[Action]]:
    """Overlap messages of 1F1B with computation, for nearly twice the memory."""
    for r in range(c.p):
        ahead = min(2 * (c.p - r - 1), c.m)
        steady = [x for i in range(c.m - ahead) for x in (F(r, ahead + i), A(r, i))]
        yield [F(r, i) for i in range(ahead)] + steady + [A(r, i) for i in range(c.m - ahead, c.m)]
