"""Declarations of installed packages by kind, and checks of features against each other and the rest.

Every check adds sentences to the faults of the candidates it concerns; those without are kept.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mindspeed_core.discovery.entry_points import BrokenPlugin, Source, broken, describe
from mindspeed_core.discovery.feature_checks import check_feature
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.discovery.order import (
    cycles,
    required_order,
    stated_order,
    who_states,
    without_overruled,
)
from mindspeed_core.discovery.slots import CORE_SLOTS
from mindspeed_core.discovery.stages import Stage, core_stages, wanted_arguments
from mindspeed_core.errors import DeclarationError, guess
from mindspeed_core.feature import ExtensionPoint, Feature, Flag, HookApi, Slot, StageSpecs
from mindspeed_core.flags.announced import feature_owners, flag_owners
from mindspeed_core.flags.core import CORE_FLAGS
from mindspeed_core.hooks.versions import parsed, refusal
from mindspeed_core.platforms.platform import Platform

HELP_OPTIONS = ("--help", "--help-flag")


@dataclass(eq=False)
class Candidate:
    """A feature that is sound by itself, before it is held against the others.

    Attributes:
        cls: the declaration.
        source: the entry point behind it.
        stated: the version of the hook interface its plugin states, empty where it states none.
        faults: what is wrong with it, one sentence each.
    """

    cls: type[Feature]
    source: Source
    stated: str = ""
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class FeatureRecord:
    """A sound feature and where it comes from.

    Attributes:
        cls: the declaration.
        dist: the distribution that ships it.
        version: its version.
        entry_point: name of the entry point.
        hook_api: the version of the hook interface it was written for: what its plugin states, otherwise the
            oldest that has every stage and argument it uses.
    """

    cls: type[Feature]
    dist: str
    version: str
    entry_point: str
    hook_api: str = "1.0"


class Declared:
    """Declarations of all installed packages by kind, the unsound ones apart.

    Attributes:
        features: every sound feature by name, sorted by family and name.
        slots: of the core and of plugins, by name.
        stages: likewise.
        stage_specs: hook specifications that plugins publish.
        points: extension points by name.
        platforms: classes that are declared, and no entry points of their own.
        hosts: likewise.
        broken: what cannot be used.
        broken_flags: option strings of broken features.
        shared_flags: option strings of sound features that a broken one declares too.
    """

    def __init__(
        self, declared: Sequence[tuple[Source, Sequence[Any]]], broken_sources: Sequence[BrokenPlugin]
    ) -> None:
        """Sort declarations and check features; ``broken_sources`` could not be loaded."""
        self.broken: list[BrokenPlugin] = list(broken_sources)
        self.slots: dict[str, Slot] = {slot.name: slot for slot in CORE_SLOTS}
        self.stage_specs: list[StageSpecs] = []
        self.stages: dict[str, Stage] = dict(core_stages())
        self.points: dict[str, ExtensionPoint] = {}
        self.platforms: dict[str, type[Platform]] = {}
        self.hosts: dict[str, HostDeclaration] = {}
        self.broken_flags: dict[str, BrokenPlugin] = {}
        self.shared_flags: dict[str, BrokenPlugin] = {}
        self.features = self._check(self._collect(declared))

    def _collect(self, declared: Sequence[tuple[Source, Sequence[Any]]]) -> list[Candidate]:
        """Sort declarations by kind; features that are unsound by themselves are out already."""
        candidates: list[Candidate] = []
        for source, declarations in declared:
            stated = self._stated_version(source, declarations)
            if stated is None:
                continue
            for item in declarations:
                if isinstance(item, HookApi):
                    continue
                if isinstance(item, Slot):
                    self.slots.setdefault(item.name, item)
                elif isinstance(item, StageSpecs):
                    self.stage_specs.append(item)
                    for stage in item.stages:
                        self.stages.setdefault(stage, Stage(stage, None, stage not in item.collecting))
                elif isinstance(item, ExtensionPoint):
                    self._add_point(source, item)
                elif isinstance(item, HostDeclaration):
                    self.hosts.setdefault(item.name, item)
                elif isinstance(item, type) and issubclass(item, Platform):
                    self.platforms.setdefault(item.name, item)
                else:
                    problems = check_alone(item)
                    if problems:
                        self._break(source, item, "; ".join(problems))
                    else:
                        candidates.append(Candidate(item, source, stated))
        return candidates

    def _stated_version(self, source: Source, declarations: Sequence[Any]) -> str | None:
        """The hook interface that a plugin states, empty for none; None, and broken, when it is not ours."""
        stated = {item.version for item in declarations if isinstance(item, HookApi)}
        if not stated:
            return ""
        try:
            version = max(stated, key=parsed)
            refused = refusal(version)
        except DeclarationError as error:
            refused, version = (str(error), ""), ""
        if refused is None:
            return version
        why, remedy = refused
        flags = [flag for item in declarations for flag in identity(item)[1]]
        options = tuple(dict.fromkeys(option for flag in flags for option in flag.options))
        record = replace(broken(source, why, remedy=remedy), flags=options)
        self.broken.append(record)
        for option in options:
            self.broken_flags.setdefault(option, record)
        return None

    def _add_point(self, source: Source, point: ExtensionPoint) -> None:
        other = self.points.get(point.name)
        if other is not None and other != point:
            error = f"extension point {point.name!r} is already declared elsewhere"
            self.broken.append(broken(source, error))
            return
        self.points[point.name] = point

    def _break(self, source: Source, item: Any, error: str) -> None:
        name, flags = identity(item)
        remedy = (
            f"pip install --upgrade {source.dist}, or report it to its authors; "
            "the other features of this installation work"
        )
        options = tuple(option for flag in flags for option in flag.options)
        record = replace(broken(source, error, feature=name, remedy=remedy), flags=options)
        self.broken.append(record)
        for option in options:
            self.broken_flags.setdefault(option, record)

    def _check(self, candidates: list[Candidate]) -> dict[str, FeatureRecord]:
        """Check features against slots, stages and each other; keep the sound ones."""
        check_together(candidates, self.slots, self.stages)
        sound: dict[str, FeatureRecord] = {}
        for candidate in sorted(candidates, key=lambda c: (c.cls.family, c.cls.name, c.source.dist)):
            if candidate.faults:
                self._break(candidate.source, candidate.cls, "; ".join(candidate.faults))
            else:
                sound[candidate.cls.name] = self._record(candidate)
        taken = {option for record in sound.values() for f in record.cls.flags for option in f.options}
        for option in sorted(taken & set(self.broken_flags)):
            self.shared_flags[option] = self.broken_flags.pop(option)
        return sound

    def _record(self, candidate: Candidate) -> FeatureRecord:
        source = candidate.source
        used = [
            self.stages[name].needed(wanted_arguments(function))
            for name, function in candidate.cls.hooks().items()
        ]
        return FeatureRecord(
            candidate.cls,
            source.dist,
            source.version,
            source.name,
            hook_api=candidate.stated or max(used, key=parsed, default="1.0"),
        )


def check_together(
    candidates: Sequence[Candidate], slots: Mapping[str, Slot], stages: Mapping[str, Stage]
) -> None:
    """Hold features against slots, stages and each other; the candidates receive their faults."""
    for candidate in candidates:
        candidate.faults += _own_flag_faults(candidate.cls)
        candidate.faults += _slot_faults(candidate.cls, slots)
        candidate.faults += _stage_faults(candidate.cls, stages)
    for check in (_check_names, _check_flags, _check_order):
        # What is broken already takes nothing from others.
        check([candidate for candidate in candidates if not candidate.faults])


def check_alone(item: Any) -> list[str]:
    """Return what is wrong with a declaration by itself, one sentence each; never raise."""
    try:
        return check_feature(item)
    except Exception as error:
        return [f"its declaration cannot be read: {describe(error)}"]


def identity(item: Any) -> tuple[str, tuple[Flag, ...]]:
    """Name and flags of something that need not be a sound feature."""
    try:
        name = item.name if isinstance(item.name, str) and item.name else ""
    except Exception:
        name = ""
    try:
        flags = tuple(flag for flag in item.flags if isinstance(flag, Flag))
    except Exception:
        flags = ()
    return name or str(getattr(item, "__name__", "") or type(item).__name__), flags


def _check_names(candidates: Sequence[Candidate]) -> None:
    """Leave a name that several distributions declare to the first of them."""
    named: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        named.setdefault(candidate.cls.name, []).append(candidate)
    for name, claimed in named.items():
        if len(claimed) < 2:
            continue
        first, *others = _by_precedence(claimed, feature_owners().get(name, ""))
        owners = " and by ".join(sorted(f"{c.source.dist} {c.source.version}" for c in claimed))
        twice = [c for c in others if c.source.dist == first.source.dist]
        keeps = "" if twice else f"; that of {first.source.dist} is used"
        for candidate in claimed if twice else others:
            candidate.faults.append(f"feature name {name!r} is declared by {owners}{keeps}")


def _own_flag_faults(feature: type[Feature]) -> list[str]:
    reserved = {option for flag in CORE_FLAGS for option in flag.options} | set(HELP_OPTIONS)
    options = [option for flag in feature.flags for option in flag.options]
    return [
        *(f"flag {option} is reserved by mindspeed-core" for option in options if option in reserved),
        *(f"flag {option} is declared twice" for option, count in Counter(options).items() if count > 1),
    ]


def _check_flags(candidates: Sequence[Candidate]) -> None:
    """Leave a flag with several meanings to the first distribution that has one meaning for it."""
    declared: dict[str, list[tuple[Candidate, Flag]]] = {}
    for candidate in candidates:
        for flag in candidate.cls.flags:
            for option in flag.options:
                declared.setdefault(option, []).append((candidate, flag))
    for option, claims in declared.items():
        if len({flag.meaning() for _, flag in claims}) < 2:
            continue
        owners = sorted({f"{c.cls.name} ({c.source.dist} {c.source.version})" for c, _ in claims})
        fault = f"flag {option} means different things in {' and in '.join(owners)}"
        kept, keeper = None, ""
        for candidate in _by_precedence([c for c, _ in claims], flag_owners().get(option, "")):
            dist = candidate.source.dist
            meanings = {flag.meaning() for c, flag in claims if c.source.dist == dist}
            if len(meanings) == 1 and kept in (None, meanings):
                kept, keeper = meanings, keeper or dist
            else:
                candidate.faults.append(fault + (f"; that of {keeper} is used" if keeper else ""))


def _by_precedence(candidates: Sequence[Candidate], owner: str) -> list[Candidate]:
    """Sort by distribution: the one that a published name belongs to, then by name; the same everywhere."""

    def key(candidate: Candidate) -> tuple[bool, str]:
        dist = candidate.source.dist.lower().replace("_", "-")
        return dist != owner, dist

    return sorted(candidates, key=key)


def _slot_faults(feature: type[Feature], slots: Mapping[str, Slot]) -> list[str]:
    return [
        f"slot {slot!r} is declared by nobody{guess(slot, slots)}; a plugin declares its own with Slot(...)"
        for slot in feature.slots
        if slot not in slots
    ]


def _stage_faults(feature: type[Feature], stages: Mapping[str, Stage]) -> list[str]:
    problems = []
    for name, function in feature.hooks().items():
        stage = stages.get(name)
        if stage is None:
            problems.append(f"stage {name!r} does not exist{guess(name, stages)}")
            continue
        problems += _yield_faults(name, function, stage)
        if stage.arguments is None:
            continue
        try:
            wanted = wanted_arguments(function)
        except (TypeError, ValueError) as error:
            problems.append(f"stage {name!r}: its implementation has no signature ({error})")
            continue
        unknown = [repr(argument) for argument in wanted if argument not in stage.arguments]
        if unknown:
            problems.append(
                f"stage {name!r}: unknown argument {', '.join(unknown)}; the stage offers "
                f"{', '.join(sorted(stage.arguments))}"
            )
    return problems


def _yield_faults(name: str, function: Any, stage: Stage) -> list[str]:
    """Compare whether an implementation wraps with whether it yields."""
    wraps, yields = function.mindspeed_impl["wrapper"], inspect.isgeneratorfunction(function)
    if wraps and not yields:
        return [f"stage {name!r}: its wrapper has no yield; write result = yield, then return the result"]
    # Results of a stage that another plugin publishes may be generators.
    if yields and not wraps and stage.arguments is not None:
        return [f"stage {name!r}: its implementation yields like a wrapper; mark it @hookimpl(wrapper=True)"]
    return []


def _check_order(candidates: Sequence[Candidate]) -> None:
    """Mark features broken that come before themselves; of several distributions, those of the last."""
    alive = list(candidates)
    while faults := _order_faults({candidate.cls.name: candidate.cls for candidate in alive}):
        for cycle, fault in faults:
            on_it = _by_precedence([c for c in alive if c.cls.name in cycle], "")
            for candidate in on_it:
                if candidate.source.dist == on_it[-1].source.dist and fault not in candidate.faults:
                    candidate.faults.append(fault)
        alive = [candidate for candidate in alive if not candidate.faults]


def _order_faults(features: Mapping[str, type[Feature]]) -> list[tuple[tuple[str, ...], str]]:
    """Return cycles with a sentence each: of what is stated, otherwise of what remains with requirements."""
    stated = stated_order(features)
    faults = []
    for cycle in cycles({name: sorted(others) for name, others in stated.items()}):
        # Each member of a cycle comes behind the following one.
        links = [
            f"{first} comes before {second} (says {who_states(first, second, features)})"
            for second, first in zip(cycle, (*cycle[1:], cycle[0]))
        ]
        faults.append((cycle, f"its place in the plan contradicts itself: {', '.join(links)}"))
    if faults:
        return faults
    required = without_overruled(required_order(features, choices=False), stated)
    for cycle in cycles({name: sorted(required[name] | stated[name]) for name in features}):
        text = " -> ".join((*cycle, cycle[0]))
        faults.append((cycle, f"its requires, after and before form a cycle: {text}"))
    return faults
