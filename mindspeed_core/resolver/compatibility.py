"""Whether the features that take part go together: slots, conflicts, stages, patches, their own checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.discovery.entry_points import describe
from mindspeed_core.feature import Feature, Patch
from mindspeed_core.resolver.request import Question, because, condition, listed
from mindspeed_core.resolver.requirements import unmet


def slots(question: Question, active: Sequence[str]) -> dict[str, str]:
    """Who fills each exclusive slot; a problem where several would."""
    claimed: dict[str, list[str]] = {}
    for name in active:
        for slot in question.index.classes[name].slots:
            if slot in question.index.exclusive:
                claimed.setdefault(slot, []).append(name)
    for slot, names in sorted(claimed.items()):
        if len(names) > 1:
            flags = [question.flag_of(name) or name for name in names]
            question.problem(
                "E-SLOT",
                names[0],
                f"slot {slot} can be filled once, but {listed(names)} claim it",
                f"keep one of {', '.join(flags)}",
            )
    return {slot: names[0] for slot, names in sorted(claimed.items())}


def conflicts(question: Question, active: Sequence[str]) -> None:
    """Pairs, and flags, that a declaration says cannot run together."""
    present = set(active)
    for name in active:
        for other, reason in sorted(question.index.conflicts[name].items()):
            if name < other and other in present:
                question.problem(
                    "E-CONFLICT",
                    name,
                    f"cannot run together with {other}{because(reason)}",
                    f"drop {question.flag_of(name) or name} or {question.flag_of(other) or other}",
                )
        for conflict in question.index.classes[name].conflicts:
            if conflict.flag and question.holds(conflict):
                question.problem(
                    "E-CONFLICT",
                    name,
                    f"cannot run with {condition(conflict)}{because(conflict.reason)}",
                    f"drop {question.flag_of(name) or name}, or change {conflict.flag}",
                )


def hosted(question: Question, active: Sequence[str]) -> None:
    """A feature that takes part only in stages which the host never calls would have no effect."""
    never = question.index.never_called
    for name in active if never else ():
        reached = question.index.classes[name].hooks().keys()
        if reached and reached <= never and not question.index.patches[name]:
            question.problem(
                "E-HOST",
                name,
                f"it works through {' and '.join(sorted(reached))}, which host {question.host} leaves to "
                "your program",
                f"drop {question.flag_of(name) or name}",
            )


def stages(question: Question, active: Sequence[str]) -> None:
    """A stage can be replaced by one feature only."""
    replaced: dict[str, list[str]] = {}
    for name in active:
        for stage in question.index.replaces[name]:
            replaced.setdefault(stage, []).append(name)
    for stage, names in sorted(replaced.items()):
        if len(names) < 2:
            continue
        shared = set.intersection(*(set(question.index.classes[n].slots) for n in names))
        if shared & question.index.exclusive:
            continue  # the slot they share is reported
        question.problem(
            "E-STAGE",
            names[0],
            f"{listed(names)} each replace stage {stage}, and only one can",
            f"keep one of {', '.join(question.flag_of(name) or name for name in names)}",
        )


def patches(question: Question, active: Sequence[str]) -> dict[str, tuple[Patch, ...]]:
    """The patches of each feature; a problem where two replace one symbol, or a version is not theirs."""
    owned: dict[str, tuple[Patch, ...]] = {}
    replaced: dict[str, list[str]] = {}
    for name in active:
        owned[name] = question.index.patches[name]
        for patch in owned[name]:
            if patch.kind == "replace":
                replaced.setdefault(patch.target, []).append(name)
            bad = unmet(patch.versions, question.kind, question.versions) if patch.versions else None
            if bad is not None:
                question.problem("E-PATCH-VERSION", name, f"its patch of {patch.target}: {bad[0]}", bad[1])
    for target, names in sorted(replaced.items()):
        if len(names) > 1:
            question.problem(
                "E-PATCH",
                names[0],
                f"{listed(names)} each replace {target}, and only one can",
                f"keep one of {', '.join(question.flag_of(name) or name for name in names)}",
            )
    return owned


def validate(question: Question, active: Sequence[str]) -> None:
    """Each feature's own check of the arguments."""
    for name in active:
        cls = question.index.classes[name]
        if cls.validate.__func__ is Feature.validate.__func__:  # type: ignore[attr-defined]
            continue
        try:
            found: Any = cls.validate(question.args)
            complaints = [found] if isinstance(found, str) else list(found)
        except Exception as error:
            complaints = [f"its own check of the arguments failed: {describe(error)}"]
        for complaint in complaints:
            question.problem("E-VALIDATE", name, str(complaint))
