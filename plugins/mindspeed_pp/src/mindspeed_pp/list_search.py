"""Search of the list of micro-batches that the simulator finds shortest: small ones first and last.

Small micro-batches fill and drain the pipeline faster; larger ones in between keep their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from mindspeed_pp.choice import Times
from mindspeed_pp.registry import rule_named
from mindspeed_pp.rule import Context
from mindspeed_pp.simulator import Costs, simulate

Sizes = tuple[int, ...]


@lru_cache(maxsize=32)
def shortest_list(
    ranks: int, microbatches: int, size: int, times: Times, largest: int | None = None, overhead: float = 0.0
) -> Sizes:
    """Return the list with the shortest step under 1F1B; the constant one where none is shorter.

    Args:
        ranks: of the pipeline.
        microbatches: of a step; the list has as many.
        size: samples of a micro-batch without a list.
        times: of ``F``, ``B`` and ``W`` of a rank's layers and a micro-batch of ``size`` samples.
        largest: most samples of one; a quarter more than ``size`` without.
        overhead: time of every pass that does not depend on its samples.
    """
    most = largest or size + -(-size // 4)
    best = constant = (size,) * microbatches
    for top in range(size, most + 1):
        ramps = [tuple(range(lowest, top)) for lowest in range(1, top + 1)]
        ends = [(head, tail) for head in ramps for tail in ramps]
        for turn in range(5):
            found = {pair: made for pair in ends if (made := _filled(*pair, top, constant))}
            if not found:
                break
            (head, tail), sizes = min(
                found.items(), key=lambda each: (_rounded(ranks, each[1], size, times, overhead), each[1])
            )
            best = min((best, sizes), key=lambda each: (_rounded(ranks, each, size, times, overhead), each))
            # One end after the other, beside what was found for the other end.
            slopes = _slopes(top)
            ends = [(head, each) if turn % 2 else (each, tail) for each in slopes]
    return best


def makespan(ranks: int, sizes: Sizes, size: int, times: Times, overhead: float = 0.0) -> float:
    """Return the time of a step of 1F1B with such a list; see `shortest_list`."""
    schedule = rule_named("1f1b").schedule(Context(ranks, 1, len(sizes), times))
    costs = replace(Costs(*times, overhead=overhead), sizes=tuple(each / size for each in sizes))
    return simulate(schedule, costs).makespan


@lru_cache(maxsize=4096)
def _rounded(ranks: int, sizes: Sizes, size: int, times: Times, overhead: float) -> float:
    return round(makespan(ranks, sizes, size, times, overhead), 9)


def _slopes(top: int) -> Iterator[Sizes]:
    """Yield rising sizes below ``top``: each of the last few up to three times, or not at all."""
    values = range(max(1, top - 4), top)
    for counts in product(range(4), repeat=len(values)):
        yield tuple(value for value, count in zip(values, counts) for _ in range(count))


def _filled(head: Sizes, tail: Sizes, top: int, constant: Sizes) -> Sizes | None:
    """Return a list with these ends, as long and of as many samples as another one; None where it has none.

    What is too much goes one by one from the micro-batches behind the head and before the tail.
    """
    middle = len(constant) - len(head) - len(tail)
    lacking = sum(head) + sum(tail) + middle * top - sum(constant)
    if not 0 <= lacking <= middle or middle <= 0 or (lacking and top == 1):
        return None
    behind, lower = (lacking + 1) // 2, (top - 1,)
    plain = (top,) * (middle - lacking)
    return (*head, *lower * behind, *plain, *lower * (lacking - behind), *tail[::-1])
