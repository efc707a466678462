"""Seconds of a pipeline's step without its timeline, for thousands of layouts.

The same rules as `mindspeed_tune.timeline`. Which pass waits for which one depends on the schedule alone and
is kept; what is left for every layout is a sum along that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from mindspeed_tune.layout import Layout
from mindspeed_tune.schedules import BACKWARD, FORWARD, Step, order

_ROUNDS = 2
"""Times the pipeline size: from so many micro-batches on a step grows by the same seconds for each."""
Durations = Mapping[tuple[str, int], float]
Waiting = tuple[int, int, int, int, bool]
"""Stage, index of its duration, index of the pass, index of the pass it waits for (-1 for none), and whether
a message lies between them."""


def pipeline_seconds(
    pp: int, vpp: int, microbatches: int, durations: Sequence[Durations], transfer: float
) -> float:
    """Return the seconds of all passes of a step.

    Once every stage is busy all further rounds of the pipeline take the same time: that of the slowest stage,
    or more, where messages cannot be hidden.

    Args:
        pp: pipeline stages.
        vpp: chunks of each.
        microbatches: of a step.
        durations: of every stage, seconds of a pass by direction and chunk.
        transfer: seconds of a message between stages.
    """
    if pp == 1:
        return microbatches * max(sum(one.values()) for one in durations)
    by_index = [[one[d, chunk] for d in (FORWARD, BACKWARD) for chunk in range(vpp)] for one in durations]
    few = min(microbatches, _ROUNDS * pp + microbatches % pp)
    seconds = _seconds(pp, vpp, few, by_index, transfer)
    rounds = (microbatches - few) // pp
    if not rounds:
        return seconds
    return seconds + rounds * (_seconds(pp, vpp, few + pp, by_index, transfer) - seconds)


def _seconds(
    pp: int, vpp: int, microbatches: int, durations: Sequence[Sequence[float]], transfer: float
) -> float:
    clock, ended = [0.0] * pp, [0.0] * (2 * pp * vpp * microbatches)
    for stage, index, own, before, message in _sequence(pp, vpp, microbatches):
        begin = clock[stage]
        if before >= 0:
            ready = ended[before] + transfer if message else ended[before]
            begin = max(begin, ready)
        clock[stage] = ended[own] = begin + durations[stage][index]
    return max(clock)


@lru_cache(maxsize=128)
def _sequence(pp: int, vpp: int, microbatches: int) -> tuple[Waiting, ...]:
    """Return all passes of a schedule in an order in which none comes before what it waits for."""
    layout = Layout(pp, pp=pp, vpp=vpp)
    orders = [order(layout, stage, microbatches) for stage in range(pp)]
    places = pp * vpp
    done = [False] * (2 * places * microbatches)
    position, found = [0] * pp, list[Waiting]()
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(orders):
            while position[stage] < len(steps):
                one = _waiting(steps[position[stage]], stage, pp, vpp, microbatches)
                if one[3] >= 0 and not done[one[3]]:
                    break
                done[one[2]] = moved = True
                found.append(one)
                position[stage] += 1
    if len(found) != len(done):
        raise ValueError(f"the schedule of {pp} stages with {vpp} chunks waits for ever")
    return tuple(found)


def _waiting(step: Step, stage: int, pp: int, vpp: int, microbatches: int) -> Waiting:
    direction, chunk, microbatch = step
    backward, here, places = int(direction == BACKWARD), chunk * pp + stage, pp * vpp

    def index(backwards: int, place: int) -> int:
        return (backwards * places + place) * microbatches + microbatch

    turn = backward and here == places - 1
    if turn:
        before = index(0, here)
    elif backward:
        before = index(1, here + 1)
    else:
        before = index(0, here - 1) if here else -1
    return stage, backward * vpp + chunk, index(backward, here), before, not turn
