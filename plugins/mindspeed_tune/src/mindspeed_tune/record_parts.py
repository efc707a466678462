"""Parts of a rank's record: its backend, its groups, its peaks, and what an allocator adds to them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from mindspeed_tune import allocator
from mindspeed_tune.allocation_events import AllocationEvents
from mindspeed_tune.rank_lists import RankList, compressed
from mindspeed_tune.record import Backend, Group, LargeTensor, Peak

FRAMES = 6
"""Lines of a stack that are kept."""


def backend_of(log: Any, platform: Any) -> Backend:
    """Return what the communication library of a platform keeps and takes, by the log of calls."""
    size, call = log.largest_temporary(platform.backend_temporaries)
    contracts = platform.contracts()
    kept = max((one.communicator_bytes(*log.communicators()) for one in contracts), default=0)
    late = (
        f"{made.operation} in {made.group}, behind {other.operation} in {other.group}"
        for made, other in log.made_late()
    )
    return Backend(
        size,
        "" if call is None else f"{call.operation} in {call.group}",
        kept,
        rules=tuple(one.name for one in contracts),
        made_late=tuple(dict.fromkeys(late)) if contracts else (),
    )


def groups_of(log: Any) -> tuple[tuple[Group, ...], dict[Any, int]]:
    """Return the groups of the rank in order of creation, and the index of each by label and ranks."""
    found: list[Group] = []
    index: dict[Any, int] = {}

    def add(name: str, ranks: Any) -> None:
        key = (name, tuple(ranks))
        if key not in index:
            index[key] = len(found)
            found.append(Group(name, _short(ranks)))

    for group in log.groups:
        if group.name:
            add(group.description, group.ranks)
    for call in log.calls:
        add(call.group, call.ranks)
    return tuple(found), index


@functools.lru_cache(maxsize=256)
def _short(ranks: tuple[int, ...]) -> RankList:
    return compressed(ranks)


def peak_of(phase: Any) -> Peak:
    """Return the peak of a phase with its largest tensors."""
    return Peak(
        dict(phase.kinds),
        dict(phase.modules),
        tuple(
            LargeTensor(one.bytes, one.kind, one.module, one.operation, _own(one.stack)[:4])
            for one in phase.largest
        ),
        phase.operation,
        _own(phase.stack)[:FRAMES],
    )


def _own(stack: Iterable[str]) -> tuple[str, ...]:
    """Return the lines of a stack that are not those of the dry run itself."""
    inner = ("mindspeed_tune/", "mindspeed_core/platforms/", "mindspeed_megatron/fake/")
    return tuple(line for line in stack if not line.startswith(inner))


def ratios_of(events: AllocationEvents) -> dict[str, float]:
    """Return what an allocator takes, as multiples of exact bytes."""
    exact = events.peak or 1
    fixed, grown = (allocator.estimate(events.events, expandable=kind) for kind in (False, True))
    return {
        "allocated_ratio": fixed.allocated / exact,
        "reserved_ratio": fixed.reserved / exact,
        "expandable_ratio": grown.reserved / exact,
    }
