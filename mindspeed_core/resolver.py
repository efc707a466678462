"""Requested flags to a plan: which features are active, in which order and why, or every reason against it.

A pure function over declarations and arguments: it imports no implementation, reads no file and gives the
same plan on every rank and every machine. What depends on the registry alone is computed once per registry,
so that a search may call `resolve` thousands of times a second.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from mindspeed_core.cycles import cycles
from mindspeed_core.discovery import describe
from mindspeed_core.feature import Conflict, Feature, Flag, Patch, Requirement
from mindspeed_core.plan import ActiveFeature, HeldBack, Plan, PlanError, Problem
from mindspeed_core.registry import FeatureRecord, Registry, RegistryError
from mindspeed_core.requirements import unmet

__all__ = ["resolve"]

_SCHEMA = 1


class _Index:
    """What the resolver needs to know about one registry and host, whatever the arguments are."""

    def __init__(self, registry: Registry, host: str) -> None:
        self.records: dict[str, FeatureRecord] = dict(registry.features)
        self.classes: dict[str, type[Feature]] = {name: r.cls for name, r in self.records.items()}
        self.key = {name: (cls.family, name) for name, cls in self.classes.items()}
        self.stages = registry.stages
        self.exclusive = {name for name, slot in registry.slots.items() if slot.exclusive}
        self.dests: dict[str, tuple[str, bool]] = {}
        self.per_rank: set[str] = set()
        declared: list[Flag] = [flag for cls in self.classes.values() for flag in cls.flags]
        for flag in (*_host_flags(registry, host), *declared):
            if flag.per_rank:
                self.per_rank.add(flag.dest)
            for option in flag.options:
                self.dests.setdefault(option, (flag.dest, bool(flag.inverts)))
        self.patches: dict[str, tuple[Patch, ...]] = {}
        self.before: dict[str, frozenset[str]] = {}
        self.conflicts: dict[str, dict[str, str]] = {name: {} for name in self.classes}
        self.replaces: dict[str, tuple[str, ...]] = {}
        for name, cls in self.classes.items():
            self.patches[name] = tuple(replace(patch, owner=name) for patch in cls.patches)
            wanted = {*cls.after}.union(*((r.feature, *r.any_of) for r in cls.requires))
            self.before[name] = frozenset(wanted & self.classes.keys() - {name})
            for conflict in cls.conflicts:
                other = conflict.feature
                if other in self.classes and other != name:
                    for one, two in ((name, other), (other, name)):
                        self.conflicts[one][two] = self.conflicts[one].get(two) or conflict.reason
            self.replaces[name] = tuple(
                stage
                for stage, function in cls.hooks().items()
                if not function.mindspeed_impl["wrapper"]  # type: ignore[attr-defined]
                # The default of a stage that a plugin publishes; any other implementation comes before it.
                and not function.mindspeed_impl["trylast"]  # type: ignore[attr-defined]
                and stage in self.stages
                and self.stages[stage].firstresult
            )


_indexes: WeakKeyDictionary[Registry, dict[str, _Index]] = WeakKeyDictionary()


def _kinds(registry: Registry, platform: str) -> tuple[frozenset[str], str]:
    """The names under which features may list a platform, and the one that their requirements test."""
    try:
        found = registry.platform(platform)
    except RegistryError:
        # A plan can be made for a platform that is not installed here.
        return frozenset({platform}), platform
    return found.kinds() | {platform}, found.like or platform


def _host_flags(registry: Registry, host: str) -> tuple[Flag, ...]:
    try:
        return registry.host_flags(host)
    except RegistryError:
        # A plan can be made for a host that is not installed here: its flags are then read by their names.
        return ()


def _index(registry: Registry, host: str) -> _Index:
    known = _indexes.setdefault(registry, {})
    if host not in known:
        known[host] = _Index(registry, host)
    return known[host]


def resolve(
    registry: Registry,
    args: Namespace,
    *,
    provenance: Mapping[str, str] | None = None,
    platform: str,
    host: str = "standalone",
    mode: str = "train",
    versions: Mapping[str, str] | None = None,
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

    Raises:
        PlanError: carries every problem.
    """
    return _Resolution(
        _index(registry, host), registry, args, provenance, platform, host, mode, versions
    ).plan()


class _Resolution:
    """One call of `resolve`: the features still in play and the problems found so far."""

    def __init__(
        self,
        index: _Index,
        registry: Registry,
        args: Namespace,
        provenance: Mapping[str, str] | None,
        platform: str,
        host: str,
        mode: str,
        versions: Mapping[str, str] | None,
    ) -> None:
        self.index = index
        self.registry = registry
        self.args = args
        self.provenance = provenance
        self.platform = platform
        self.kinds, self.kind = _kinds(registry, platform)
        self.host = host
        self.mode = mode
        self.versions = versions
        level = getattr(args, "optimization_level", None)
        self.level = 2 if level is None else int(level)
        self.why: dict[str, str] = {}
        self.held: dict[str, HeldBack] = {}
        self.failed: set[str] = set()
        self.taken: set[str] = set()
        self.problems: list[Problem] = []

    def plan(self) -> Plan:
        for name in self._requested():
            self._admit(name, self._flag_of(name) or "default")
        self._close()
        self._take_over()
        self._suppress_dependents()
        active = [name for name in self.index.classes if name in self.why and name not in self.failed]
        slots = self._slots(active)
        self._conflicts(active)
        self._stages(active)
        patches = self._patches(active)
        self._validate(active)
        order = self._order(active)
        if self.problems:
            raise PlanError(self.problems)
        return self._result(order, slots, patches)

    def _problem(self, code: str, name: str, reason: str, remedy: str = "", flag: str | None = None) -> None:
        given = self._flag_of(name) if flag is None else flag
        self.problems.append(Problem(code, reason, remedy, feature=name, flag=given))

    def _requested(self) -> list[str]:
        requested = []
        for name, cls in self.index.classes.items():
            try:
                if cls.enabled(self.args):
                    requested.append(name)
            except Exception as error:
                self._problem(
                    "E-ENABLED",
                    name,
                    f"it cannot say whether it is asked for: {describe(error)}",
                    "check the values of its flags, or report it to its authors",
                )
        return requested

    def _flag_of(self, name: str) -> str:
        """The flag that asks for a feature: the first one given, or the preset that set it."""
        cls = self.index.classes.get(name)
        for flag in cls.flags if cls is not None else ():
            if self.provenance is None:
                if getattr(self.args, flag.dest, flag.default) != flag.default:
                    return flag.name
                continue
            source = self.provenance.get(flag.dest, "default")
            if source.startswith("flag "):
                return source.removeprefix("flag ")
            if source != "default":
                return f"{flag.name} by {source}"
        return ""

    def _admit(self, name: str, why: str) -> bool:
        """Activate a feature unless level, mode or platform are against it; True when it is active."""
        if name in self.why:
            return True
        if name in self.held or name in self.failed:
            return False
        cls = self.index.classes[name]
        flag = self._flag_of(name)
        if cls.level > self.level:
            self.held[name] = HeldBack(
                name,
                f"it belongs to optimization level {cls.level}, the run has level {self.level}",
                flag,
                f"--optimization-level {cls.level}",
            )
            return False
        if self.mode not in cls.modes:
            self.held[name] = HeldBack(
                name, f"it has no effect in mode {self.mode}", flag, "nothing; the flag is ignored"
            )
            return False
        if not self.kinds & {*cls.platforms}:
            return self._fall_back(name, cls, flag)
        if cls.hosts and self.host not in cls.hosts:
            self._problem(
                "E-HOST",
                name,
                f"it does not work in the training loop of host {self.host} (it works in: "
                f"{', '.join(cls.hosts)})",
                f"drop {flag}" if flag else f"use one of these hosts: {', '.join(cls.hosts)}",
            )
            self.failed.add(name)
            return False
        bad = [
            problem
            for package in cls.packages
            if (problem := unmet(package, self.kind, self.versions)) is not None
        ]
        if bad:
            for reason, remedy in bad:
                self._problem("E-PACKAGE", name, reason, remedy)
            self.failed.add(name)
            return False
        self.why[name] = why
        return True

    def _fall_back(self, name: str, cls: type[Feature], flag: str) -> bool:
        supported = ", ".join(cls.platforms) or "none"
        if cls.fallback is None:
            self._problem(
                "E-PLATFORM",
                name,
                f"it does not run on platform {self.platform} (it runs on: {supported})",
                f"drop {flag}" if flag else f"choose one of these platforms with --platform: {supported}",
            )
            self.failed.add(name)
            return False
        other = cls.fallback.feature
        remedy = f"nothing; {other} takes over" if other else f"nothing; it runs on: {supported}"
        self.held[name] = HeldBack(name, cls.fallback.reason, flag, remedy)
        if other:
            if other not in self.index.classes:
                self._missing(name, other, f"it takes over on platform {self.platform}")
            else:
                self._admit(other, f"fallback of {name}")
        return False

    def _missing(self, name: str, wanted: str, reason: str) -> None:
        """A feature that another one needs is not installed, or broken."""
        from mindspeed_core.known_flags import feature_owners

        record = next((b for b in self.registry.broken if b.feature == wanted), None)
        dist = feature_owners().get(wanted, "")
        if record is None and dist:
            record = next((b for b in self.registry.broken if b.dist == dist and not b.feature), None)
        because = f" ({reason})" if reason else ""
        if record is not None:
            self._problem("E-BROKEN-PLUGIN", name, f"needs {wanted}{because}: {record}", record.remedy)
        else:
            remedy = f"pip install {dist}" if dist else f"install the package that ships {wanted}"
            reason = f"needs {wanted}, which is not installed{because}"
            self._problem("E-MISSING-PLUGIN", name, reason, remedy)
        self.failed.add(name)

    def _close(self) -> None:
        """Follow requirements breadth first, then check those that ask for a choice or a value."""
        queue = list(self.why)
        visited: set[str] = set()
        while queue:
            following: list[str] = []
            for name in queue:
                if name in visited:
                    continue
                visited.add(name)
                for requirement in self.index.classes[name].requires:
                    wanted = requirement.feature
                    if not requirement.implies or wanted in self.why or wanted not in self.index.classes:
                        continue
                    before = set(self.why)
                    self._admit(wanted, f"implied by {name}")
                    following += [new for new in self.why if new not in before]
            queue = following
        for name in list(self.why):
            for requirement in self.index.classes[name].requires:
                self._require(name, requirement)

    def _require(self, name: str, requirement: Requirement) -> None:
        if requirement.feature:
            self._require_feature(name, requirement)
        elif requirement.any_of:
            self._require_any(name, requirement)
        elif not self._holds(requirement):
            wanted = _condition(requirement)
            self._problem(
                "E-REQUIRES",
                name,
                f"needs {wanted}{_because(requirement.reason)}; it is {self._shown(requirement.flag)}",
                f"set {wanted}",
            )
            self.failed.add(name)

    def _require_feature(self, name: str, requirement: Requirement) -> None:
        wanted = requirement.feature
        # A requirement that failed has its own problem already.
        if wanted in self.why or wanted in self.failed:
            return
        if wanted not in self.index.classes:
            self._missing(name, wanted, requirement.reason)
            return
        because = _because(requirement.reason)
        held = self.held.get(wanted)
        level = self.index.classes[wanted].level
        if level > self.level:
            self._problem(
                "E-REQUIRES-LEVEL",
                name,
                f"needs {wanted}{because}, which belongs to optimization level {level}; "
                f"the run has {self.level}",
                f"--optimization-level {level}, or drop {self._flag_of(name) or name}",
            )
        elif held is not None:
            self._problem(
                "E-REQUIRES",
                name,
                f"needs {wanted}{because}, which is not active: {held.reason}",
                f"drop {self._flag_of(name) or name}",
            )
        else:
            self._problem("E-REQUIRES", name, f"needs {wanted}{because}", self._how_to_ask(wanted))
        self.failed.add(name)

    def _require_any(self, name: str, requirement: Requirement) -> None:
        choices = requirement.any_of
        if any(choice in self.why or choice in self.failed for choice in choices):
            return
        installed = [choice for choice in choices if choice in self.index.classes]
        if not installed:
            self._missing(name, choices[0], requirement.reason)
            return
        ways = ", or ".join(self._how_to_ask(choice) for choice in installed)
        reason = f"needs one of {', '.join(choices)}{_because(requirement.reason)}"
        self._problem("E-REQUIRES", name, reason, ways)
        self.failed.add(name)

    def _how_to_ask(self, name: str) -> str:
        flags = self.index.classes[name].flags
        return f"add {flags[0].name}" if flags else f"switch {name} on"

    def _value(self, option: str) -> tuple[Any, bool]:
        """The value a flag stands for, and whether the flag turns it off."""
        dest, inverts = self.index.dests.get(option) or (option.lstrip("-").replace("-", "_"), False)
        return getattr(self.args, dest, None), inverts

    def _shown(self, option: str) -> str:
        value, inverts = self._value(option)
        if inverts:
            value = value is not None and not value
        return "not set" if value is None or value is False else repr(value)[:200]

    def _holds(self, condition: Requirement | Conflict) -> bool:
        value, inverts = self._value(condition.flag)
        if condition.one_of:
            return value in condition.one_of
        if condition.equals is not None:
            return bool(value == condition.equals)
        return value is not None and bool(value) != inverts

    def _take_over(self) -> None:
        """Hold back what an active feature does as well; requirements on it were followed before."""
        for name in list(self.why):
            if name not in self.why or name in self.failed:
                continue
            for taken in self.index.classes[name].takes_over:
                other = taken.feature
                if other in self.why and other not in self.failed:
                    remedy = f"nothing; {name} takes over"
                    self.held[other] = HeldBack(other, taken.reason, self._flag_of(other), remedy)
                    self.taken.add(other)
                    del self.why[other]

    def _suppress_dependents(self) -> None:
        """What needs a failed feature is out too, without a problem of its own."""
        changed = bool(self.failed)
        while changed:
            changed = False
            for name in self.why:
                if name in self.failed:
                    continue
                for requirement in self.index.classes[name].requires:
                    choices = requirement.any_of
                    present = (self.why.keys() | self.taken) - self.failed
                    lost = requirement.feature in self.failed or (choices and not present & {*choices})
                    if lost:
                        self.failed.add(name)
                        changed = True
                        break

    def _slots(self, active: Sequence[str]) -> dict[str, str]:
        claimed: dict[str, list[str]] = {}
        for name in active:
            for slot in self.index.classes[name].slots:
                if slot in self.index.exclusive:
                    claimed.setdefault(slot, []).append(name)
        for slot, names in sorted(claimed.items()):
            if len(names) > 1:
                flags = [self._flag_of(name) or name for name in names]
                self._problem(
                    "E-SLOT",
                    names[0],
                    f"slot {slot} can be filled once, but {_and(names)} claim it",
                    f"keep one of {', '.join(flags)}",
                )
        return {slot: names[0] for slot, names in sorted(claimed.items())}

    def _conflicts(self, active: Sequence[str]) -> None:
        present = set(active)
        for name in active:
            for other, reason in sorted(self.index.conflicts[name].items()):
                if name < other and other in present:
                    self._problem(
                        "E-CONFLICT",
                        name,
                        f"cannot run together with {other}{_because(reason)}",
                        f"drop {self._flag_of(name) or name} or {self._flag_of(other) or other}",
                    )
            for conflict in self.index.classes[name].conflicts:
                if conflict.flag and self._holds(conflict):
                    self._problem(
                        "E-CONFLICT",
                        name,
                        f"cannot run with {_condition(conflict)}{_because(conflict.reason)}",
                        f"drop {self._flag_of(name) or name}, or change {conflict.flag}",
                    )

    def _stages(self, active: Sequence[str]) -> None:
        replaced: dict[str, list[str]] = {}
        for name in active:
            for stage in self.index.replaces[name]:
                replaced.setdefault(stage, []).append(name)
        for stage, names in sorted(replaced.items()):
            if len(names) < 2:
                continue
            shared = set.intersection(*(set(self.index.classes[n].slots) for n in names))
            if shared & self.index.exclusive:
                continue  # the slot they share is reported
            self._problem(
                "E-STAGE",
                names[0],
                f"{_and(names)} each replace stage {stage}, and only one can",
                f"keep one of {', '.join(self._flag_of(name) or name for name in names)}",
            )

    def _patches(self, active: Sequence[str]) -> dict[str, tuple[Patch, ...]]:
        owned: dict[str, tuple[Patch, ...]] = {}
        replaced: dict[str, list[str]] = {}
        for name in active:
            owned[name] = self.index.patches[name]
            for patch in owned[name]:
                if patch.kind == "replace":
                    replaced.setdefault(patch.target, []).append(name)
                bad = unmet(patch.versions, self.kind, self.versions) if patch.versions else None
                if bad is not None:
                    self._problem("E-PATCH-VERSION", name, f"its patch of {patch.target}: {bad[0]}", bad[1])
        for target, names in sorted(replaced.items()):
            if len(names) > 1:
                self._problem(
                    "E-PATCH",
                    names[0],
                    f"{_and(names)} each replace {target}, and only one can",
                    f"keep one of {', '.join(self._flag_of(name) or name for name in names)}",
                )
        return owned

    def _validate(self, active: Sequence[str]) -> None:
        for name in active:
            cls = self.index.classes[name]
            if cls.validate.__func__ is Feature.validate.__func__:  # type: ignore[attr-defined]
                continue
            try:
                found: Any = cls.validate(self.args)
                complaints = [found] if isinstance(found, str) else list(found)
            except Exception as error:
                complaints = [f"its own check of the arguments failed: {describe(error)}"]
            for complaint in complaints:
                self._problem("E-VALIDATE", name, str(complaint))

    def _order(self, active: Sequence[str]) -> list[str]:
        """Dependencies first; among what is free to go next, by family and name."""
        present = set(active)
        before = {name: sorted(self.index.before[name] & present) for name in active}
        missing = {name: len(befores) for name, befores in before.items()}
        followers: dict[str, list[str]] = {}
        for name, befores in before.items():
            for other in befores:
                followers.setdefault(other, []).append(name)
        ready = [self.index.key[name] for name in active if not missing[name]]
        heapq.heapify(ready)
        order: list[str] = []
        while ready:
            _, name = heapq.heappop(ready)
            order.append(name)
            for follower in followers.get(name, ()):
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, self.index.key[follower])
        if len(order) < len(active):
            for cycle in cycles(before):
                self._problem(
                    "E-CYCLE",
                    cycle[0],
                    f"each of these comes before itself: {' -> '.join((*cycle, cycle[0]))}",
                    "drop one of them, and report it to their authors",
                )
        return order

    def _result(
        self, order: Sequence[str], slots: Mapping[str, str], patches: Mapping[str, tuple[Patch, ...]]
    ) -> Plan:
        features = []
        arguments: dict[str, Any] = {}
        for name in order:
            record = self.index.records[name]
            features.append(
                ActiveFeature(
                    name, record.dist, record.version, record.cls.family, record.cls.level, self.why[name]
                )
            )
        # Who takes over reads the flags of what it does as well.
        for name in (*order, *self.taken):
            for flag in self.index.classes[name].flags:
                arguments[flag.dest] = getattr(self.args, flag.dest, flag.default)
        applied = tuple(patch for name in order for patch in patches[name])
        # What nobody asked for is not worth a line: a feature that is on by default and above the level.
        held = tuple(
            self.held[name] for name in sorted(self.held) if self.held[name].flag or self._is_replaced(name)
        )
        plan = Plan(
            features=tuple(features),
            held_back=held,
            slots=dict(slots),
            patches=applied,
            platform=self.platform,
            host=self.host,
            level=self.level,
            mode=self.mode,
            arguments=dict(sorted(arguments.items())),
        )
        return replace(plan, digest=_digest(plan, self.index.per_rank))

    def _is_replaced(self, name: str) -> bool:
        return f"fallback of {name}" in self.why.values()


def _digest(plan: Plan, per_rank: Iterable[str]) -> str:
    """SHA-256 over canonical JSON of everything that makes two runs differ."""
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
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _plain(value: Any) -> Any:
    """A value JSON does not know; sets are sorted, since their order differs between processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    name = getattr(value, "__qualname__", "")
    return name or (str(value) if type(value).__str__ is not object.__str__ else type(value).__qualname__)


def _condition(condition: Requirement | Conflict) -> str:
    if condition.one_of:
        return f"{condition.flag} {' or '.join(str(value) for value in condition.one_of)}"
    return condition.flag if condition.equals is None else f"{condition.flag} {condition.equals}"


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
