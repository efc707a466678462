"""Resolution of a request: the active features, their compatibility and their order."""

from __future__ import annotations

import heapq
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.order import cycles, who_states, without_overruled
from mindspeed_core.feature import Patch
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.compatibility import (
    check_arguments,
    check_conflicts,
    check_host,
    check_roles,
    check_stages,
    collect_notes,
    collect_patches,
    fill_slots,
)
from mindspeed_core.resolver.index import index_of
from mindspeed_core.resolver.plan import ActiveFeature, HeldBack, Note, Plan, PlanError, Unread
from mindspeed_core.resolver.request import Request
from mindspeed_core.resolver.selection import Selection
from mindspeed_core.resolver.unread import check_unread

_SCHEMA = 1


def resolve(
    registry: Registry,
    args: Namespace,
    *,
    provenance: Mapping[str, str] | None = None,
    platform: str,
    host: str = DEFAULT_HOST,
    mode: str = "train",
    versions: Mapping[str, str] | None = None,
    left_out: Sequence[HeldBack] = (),
) -> Plan:
    """Decide what is active.

    Args:
        registry: what is installed.
        args: the parsed arguments; never changed.
        provenance: where each argument's value came from; without it a value that differs from its flag's
            default counts as given.
        platform: name of the platform.
        host: name of the host.
        mode: ``train`` or ``inference``.
        versions: installed distributions with their versions; by default asked of the environment.
        left_out: features that must not take part, since their own code failed before.

    Raises:
        PlanError: carries every problem.
    """
    request = Request(index_of(registry, host), registry, args, provenance, platform, host, mode, versions)
    selection = Selection(request, left_out)
    active = selection.select()
    claimed = fill_slots(request, active)
    check_roles(request, active)
    check_conflicts(request, active)
    check_host(request, active)
    check_stages(request, active)
    owned = collect_patches(request, active)
    failing = check_arguments(request, selection, active)
    if failing:
        return resolve(
            registry,
            args,
            provenance=provenance,
            platform=platform,
            host=host,
            mode=mode,
            versions=versions,
            left_out=(*left_out, *failing),
        )
    unread = check_unread(request, selection, active)
    order = _order(request, active)
    if request.problems:
        raise PlanError(request.problems)
    return _result(selection, order, claimed, owned, unread)


def _order(request: Request, active: Sequence[str]) -> list[str]:
    """Order features: as they state, then dependencies first, otherwise by family and name."""
    present, index = set(active), request.index
    before: Mapping[str, Set[str]] = {name: index.before[name] & present for name in active}
    order = _sorted(request, before)
    if len(order) < len(active):
        stated = {name: index.stated[name] & present for name in active}
        required = without_overruled({name: index.required[name] & present for name in active}, stated)
        before = {name: stated[name] | required[name] for name in active}
        order = _sorted(request, before)
    if len(order) < len(active):
        for cycle in cycles({name: sorted(others) for name, others in before.items()}):
            request.problem(
                "E-CYCLE",
                cycle[0],
                f"each of these comes before itself: {' -> '.join((*cycle, cycle[0]))}",
                f"drop {' or '.join(request.flag_or_name(name) for name in cycle)}, and report it to their "
                "authors",
            )
    return order


def _sorted(request: Request, before: Mapping[str, Set[str]]) -> list[str]:
    """Sort topologically, ties by family and name; nothing where features come before themselves."""
    sorter = TopologicalSorter(before)
    try:
        sorter.prepare()
    except CycleError:
        return []
    ready: list[tuple[str, str]] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, request.index.key[name])
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return order


def _result(
    selection: Selection,
    order: Sequence[str],
    claimed: Mapping[str, str],
    owned: Mapping[str, tuple[Patch, ...]],
    unread: tuple[Unread, ...],
) -> Plan:
    request, why, held = selection.request, selection.why, selection.held
    features = []
    arguments: dict[str, Any] = {}
    for name in order:
        record = request.index.records[name]
        cls = record.cls
        features.append(
            ActiveFeature(
                *(name, record.dist, record.version, cls.family, cls.level, why[name]),
                affects_checkpoint=cls.affects_checkpoint,
            )
        )
    # Who takes over reads the flags of what it does as well.
    for name in (*order, *selection.taken):
        for flag in request.index.classes[name].flags:
            arguments[flag.dest] = getattr(request.args, flag.dest, flag.default)
    applied = tuple(patch for name in order for patch in owned[name])
    # What nobody asked for is not worth a line: a feature that is on by default and above the level.
    shown = tuple(
        held[name]
        for name in sorted(held)
        if held[name].flag or held[name].broken or f"fallback of {name}" in why.values()
    )
    plan = Plan(
        features=tuple(features),
        held_back=shown,
        slots=dict(claimed),
        patches=applied,
        platform=request.platform,
        host=request.host,
        level=request.level,
        mode=request.mode,
        arguments=dict(sorted(arguments.items())),
        notes=(
            *collect_notes(request, order),
            # What is held back is listed with its reason already.
            *(Note("", str(flag)) for flag in unread if not flag.held_back),
        ),
        unread=unread,
        stated_order=tuple(_stated(request, order)),
    )
    return replace(plan, digest=_digest(plan, request.index.per_rank))


def _stated(request: Request, order: Sequence[str]) -> Iterator[str]:
    """Return which of the active features come before others because one of the two says so."""
    classes, place = request.index.classes, {name: position for position, name in enumerate(order)}
    for second in (name for name in order if request.index.stated[name]):
        for first in sorted(request.index.stated[second] & place.keys(), key=place.__getitem__):
            yield f"{first} comes before {second} (says {who_states(first, second, classes)})"


def _digest(plan: Plan, per_rank: Iterable[str]) -> str:
    """Return the SHA-256 of canonical JSON of everything that makes two runs differ."""
    content = {
        "schema": _SCHEMA,
        "features": [[f.name, f.dist, f.version] for f in plan.features],
        "slots": dict(plan.slots),
        "patches": [[p.target, p.kind, p.owner] for p in plan.patches],
        "platform": plan.platform,
        "host": plan.host,
        "level": plan.level,
        "mode": plan.mode,
        "arguments": {k: v for k, v in plan.arguments.items() if k not in per_rank},
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=_plain)
    import hashlib

    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    """Convert a value for JSON; sets are sorted, since their order differs between processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    name = getattr(value, "__qualname__", "")
    return name or (str(value) if type(value).__str__ is not object.__str__ else type(value).__qualname__)
