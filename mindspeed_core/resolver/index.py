"""The part of resolving that depends on the registry alone, computed once for each registry and host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any
from weakref import WeakKeyDictionary

from mindspeed_core.discovery.order import required_order, stated_order
from mindspeed_core.discovery.slots import claimed_roles, roles_meet
from mindspeed_core.feature import Feature, Flag, Patch
from mindspeed_core.flags.core import CORE_FLAGS
from mindspeed_core.registry import FeatureRecord, Registry, RegistryError


class Index:
    """Facts about one registry and host that hold for all arguments."""

    def __init__(self, registry: Registry, host: str) -> None:
        self.records: dict[str, FeatureRecord] = dict(registry.features)
        self.classes: dict[str, type[Feature]] = {name: r.cls for name, r in self.records.items()}
        self.key = {name: (cls.family, name) for name, cls in self.classes.items()}
        self.stages = registry.stages
        self.with_notes = self._overriding("notes")
        self.with_unread = self._overriding("unread")
        self.never_called = _never_called(registry, host)
        self.exclusive = {name for name, slot in registry.slots.items() if slot.exclusive}
        self.same_roles = _same_roles(registry)
        self.dests: dict[str, tuple[str, bool]] = {}
        self.flags: dict[str, Flag] = {}
        self.per_rank: set[str] = set()
        declared: list[Flag] = [flag for cls in self.classes.values() for flag in cls.flags]
        of_host = (*CORE_FLAGS, *_host_flags(registry, host))
        for flag in (*of_host, *declared):
            if flag.per_rank:
                self.per_rank.add(flag.dest)
            for option in flag.options:
                self.dests.setdefault(option, (flag.dest, bool(flag.inverts)))
                self.flags.setdefault(option, flag)
        self.readers = _readers(self.classes, {flag.dest for flag in of_host})
        self.unshared: dict[str, Any] = {}
        self.first_option: dict[str, str] = {}
        for flag in declared:
            if flag.dest in self.readers:
                self.unshared.setdefault(flag.dest, flag.default)
                self.first_option.setdefault(flag.dest, flag.name)
        self.patches: dict[str, tuple[Patch, ...]] = {}
        self.stated = stated_order(self.classes)
        self.required = required_order(self.classes, choices=True)
        self.before = {name: frozenset(self.stated[name] | self.required[name]) for name in self.classes}
        self.conflicts: dict[str, dict[str, str]] = {name: {} for name in self.classes}
        self.replaces: dict[str, tuple[str, ...]] = {}
        for name, cls in self.classes.items():
            self.patches[name] = tuple(replace(patch, owner=name) for patch in cls.patches)
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

    def _overriding(self, method: str) -> set[str]:
        """Return the features that have a class method of their own."""
        base = getattr(Feature, method).__func__
        return {name for name, cls in self.classes.items() if getattr(cls, method).__func__ is not base}


def _readers(classes: Mapping[str, type[Feature]], read_by_host: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the features that read a flag while they are active, for each one that only features read."""
    readers: dict[str, list[str]] = {}
    for name, cls in classes.items():
        for dest in {flag.dest: None for flag in cls.flags if flag.dest not in read_by_host}:
            readers.setdefault(dest, []).append(name)
    return {dest: tuple(names) for dest, names in readers.items()}


def _same_roles(registry: Registry) -> dict[str, dict[str, list[str]]]:
    """Return pairs of features, the first name first, that replace the same modules but share no slot."""
    classes = {name: record.cls for name, record in registry.features.items()}
    exclusive = {name for name, slot in registry.slots.items() if slot.exclusive}
    claims = {name: claimed_roles(cls, registry.slots) for name, cls in classes.items()}
    pairs: dict[str, dict[str, list[str]]] = {}
    for one, other in combinations([name for name in sorted(claims) if claims[name]], 2):
        if {*classes[one].slots} & {*classes[other].slots} & exclusive:
            continue
        both = sorted(r for r in claims[one] if any(roles_meet(r, claimed) for claimed in claims[other]))
        if both:
            pairs.setdefault(one, {})[other] = both
    return pairs


_indexes: WeakKeyDictionary[Registry, dict[str, Index]] = WeakKeyDictionary()


def _host_flags(registry: Registry, host: str) -> tuple[Flag, ...]:
    try:
        return registry.host_flags(host)
    except RegistryError:
        # A plan can be made for a host that is not installed here: its flags are then read by their names.
        return ()


def _never_called(registry: Registry, host: str) -> frozenset[str]:
    try:
        return frozenset(registry.host(host).never_calls)
    except RegistryError:
        return frozenset()


def index_of(registry: Registry, host: str) -> Index:
    """Return the index of a registry, made at the first call."""
    known = _indexes.setdefault(registry, {})
    if host not in known:
        known[host] = Index(registry, host)
    return known[host]
