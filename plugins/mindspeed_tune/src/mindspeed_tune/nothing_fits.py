"""The message of a search in which no candidate fits: by how much, and the nearest layout that does."""

from __future__ import annotations

from typing import Any, Protocol

from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.launch_plan import make_plan
from mindspeed_tune.nearest_fit import nearest_beyond
from mindspeed_tune.quantities import size
from mindspeed_tune.warm_process import PlanError

_NEAREST = "nearest"


class Searched(Protocol):
    """A search that has ended, as far as its message reads it; see `mindspeed_tune.search.Search`."""

    validity: Any
    ranked: dict[str, Any]
    unranked: dict[str, str]
    hardware: Any
    journal: Any
    command: Any
    flags: Any
    process: Any
    per_node: int


def nothing_fits(search: Searched) -> str:
    """Return why a search has no result, in a sentence that says what would help."""
    refused = list(search.validity.refused.values())
    if not search.ranked:
        reason = next(iter(search.unranked.values()), "") or refused[0].reason
        return f"no candidate could be planned: {reason}"
    smallest = min(search.ranked.values(), key=lambda one: (one.estimate.needed, one.candidate.name))
    missing = smallest.estimate.needed - search.hardware.memory
    if missing <= 0:
        problem = next(p for one in search.ranked.values() for p in one.estimate.problems)
        return f"every candidate has a problem; the first: {problem}"
    return (
        f"no layout of {search.command.world_size:,} ranks fits into the {size(search.hardware.memory)} of "
        f"{search.hardware.name}: the smallest, {smallest.candidate.name}, needs {size(missing)} more; "
        f"{_nearest(search, smallest)}"
    )


def _nearest(search: Searched, smallest: Any) -> str:
    """Return the nearest layout of more ranks that fits, estimated from a plan of the smallest one."""
    known = search.journal.get(_NEAREST, smallest.candidate.name)
    if known is None:
        known = _planned(search, smallest)
        search.journal.put(_NEAREST, smallest.candidate.name, known)
    return str(known)


def _planned(search: Searched, smallest: Any) -> str:
    command = smallest.candidate.command(search.command, search.flags)
    try:
        with Ranks(command, process=search.process, reliefs=False) as ranks:
            plan = make_plan(command.text, records_of(ranks), search.hardware, search.per_node)
    except PlanError as error:
        return f"use more ranks, or a device with more memory (the nearest is not known: {error})"
    kind = plan.fullest
    nearest, least = nearest_beyond(kind.record, kind.fullest, search.per_node)
    if nearest is None:
        return (
            f"no layout of up to {least.world_size:,} ranks fits either: the smallest needs an estimated "
            f"{size(least.needed)} ({least.flags}); use a device with more memory"
        )
    return (
        f"the nearest layout that fits, estimated at {size(nearest.needed)}, takes {nearest.world_size:,} "
        f"ranks: {nearest.flags}; start so many, or use a device with more memory"
    )
