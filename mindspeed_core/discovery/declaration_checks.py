"""Checks of features against each other and against what is installed: names, flags, slots, stages, order.

Every check adds sentences to the faults of the candidates it concerns; the registry keeps those without.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from mindspeed_core.discovery.cycles import cycles
from mindspeed_core.discovery.entry_points import Source, describe
from mindspeed_core.discovery.feature_checks import check_feature
from mindspeed_core.discovery.stages import Stage, wanted_arguments
from mindspeed_core.feature import Feature, Flag, Slot
from mindspeed_core.flags.core import CORE_FLAGS

HELP_OPTIONS = ("--help",)


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


def check_together(
    candidates: Sequence[Candidate], slots: Mapping[str, Slot], stages: Mapping[str, Stage]
) -> None:
    """Hold features against slots, stages and each other; the candidates receive their faults."""
    _check_names(candidates)
    _check_flags(candidates)
    for candidate in candidates:
        candidate.faults += _slot_faults(candidate.cls, slots)
        candidate.faults += _stage_faults(candidate.cls, stages)
    _check_cycles([candidate for candidate in candidates if not candidate.faults])


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


def guess(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where a known name is spelled like ``name``, otherwise nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _check_names(candidates: Sequence[Candidate]) -> None:
    named: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        named.setdefault(candidate.cls.name, []).append(candidate)
    for name, claimed in named.items():
        if len(claimed) > 1:
            owners = " and by ".join(sorted(f"{c.source.dist} {c.source.version}" for c in claimed))
            for candidate in claimed:
                candidate.faults.append(f"feature name {name!r} is declared by {owners}")


def _check_flags(candidates: Sequence[Candidate]) -> None:
    reserved = {option for flag in CORE_FLAGS for option in flag.options} | set(HELP_OPTIONS)
    declared: dict[str, list[tuple[Candidate, Flag]]] = {}
    for candidate in candidates:
        seen: set[str] = set()
        for flag in candidate.cls.flags:
            for option in flag.options:
                if option in reserved:
                    candidate.faults.append(f"flag {option} is reserved by mindspeed-core")
                if option in seen:
                    candidate.faults.append(f"flag {option} is declared twice")
                seen.add(option)
                declared.setdefault(option, []).append((candidate, flag))
    for option, claims in declared.items():
        if len({flag.meaning() for _, flag in claims}) < 2:
            continue
        owners = sorted({f"{c.cls.name} ({c.source.dist} {c.source.version})" for c, _ in claims})
        for candidate, _ in claims:
            candidate.faults.append(f"flag {option} means different things in {' and in '.join(owners)}")


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


def _check_cycles(candidates: Sequence[Candidate]) -> None:
    """Mark features broken that come before themselves through ``requires`` and ``after``."""
    by_name = {candidate.cls.name: candidate for candidate in candidates}
    before = {
        candidate.cls.name: sorted(
            {r.feature for r in candidate.cls.requires if r.feature in by_name}
            | {name for name in candidate.cls.after if name in by_name}
        )
        for candidate in candidates
    }
    for cycle in cycles(before):
        text = " -> ".join((*cycle, cycle[0]))
        for name in cycle:
            by_name[name].faults.append(f"its requires and after form a cycle: {text}")
