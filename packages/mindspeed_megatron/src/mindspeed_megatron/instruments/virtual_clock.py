"""Communication that a rank waits for, on a clock that only moves with its work.

What a machine hides depends on its speed. What a program could hide does not: the order of its work,
launches and waits is recorded by `count_communication(computation=True)`, and times are given to it here.
Computation takes as long as its operations, communication as long as the caller says, one call of a group
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mindspeed_megatron.instruments.communication import Call


@dataclass(frozen=True)
class Exposed:
    """One call on the clock.

    Attributes:
        call: of the program.
        duration: of its communication, in operations.
        waited: how long the rank waited for it, in operations.
        meanwhile: operations that the rank executed between launch and wait.
    """

    call: Call
    duration: float
    waited: float
    meanwhile: int


def on_a_clock(calls: Iterable[Call], duration: Callable[[Call], float | None]) -> list[Exposed]:
    """Return what a rank waits for, call by call in the order of their waits.

    Args:
        calls: of a rank, recorded with their computation; calls that nobody waited for are left out.
        duration: of a call in floating-point operations of the rank; None leaves the call out.
    """
    known = [(call, length) for call in calls if call.waited and (length := duration(call)) is not None]
    events = []
    for number, (call, _) in enumerate(known):
        assert call.waited is not None
        # Host time orders what happens between two operations.
        events.append((call.launched.seconds, 0, number, call.launched.flops))
        events.append((call.waited.seconds, 1, number, call.waited.flops))
    late = 0.0
    free: dict[str, float] = {}
    ends: dict[int, float] = {}
    found = []
    for _, waits, number, flops in sorted(events):
        call, length = known[number]
        now = flops + late
        if not waits:
            ends[number] = free[call.group] = max(now, free.get(call.group, 0.0)) + length
            continue
        waited = max(0.0, ends[number] - now)
        late += waited
        assert call.waited is not None
        found.append(Exposed(call, length, waited, call.waited.flops - call.launched.flops))
    return found
