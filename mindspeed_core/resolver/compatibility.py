"""Compatibility of the selected features: slots, conflicts, stages, patches, their own checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Feature, Patch
from mindspeed_core.resolver.plan import HeldBack, Note
from mindspeed_core.resolver.remedies import to_avoid
from mindspeed_core.resolver.request import Request, condition_text, join_names, parenthesized
from mindspeed_core.resolver.requirements import unmet
from mindspeed_core.resolver.selection import Selection
from mindspeed_core.terminal.foreign_text import clean


def fill_slots(request: Request, active: Sequence[str]) -> dict[str, str]:
    """Return the feature that fills each exclusive slot; several are a problem."""
    claimed: dict[str, list[str]] = {}
    for name in active:
        for slot in request.index.classes[name].slots:
            if slot in request.index.exclusive:
                claimed.setdefault(slot, []).append(name)
    for slot, names in sorted(claimed.items()):
        if len(names) > 1:
            reason = f"slot {slot} can be filled once, but {join_names(names)} claim it"
            _keep_one(request, "E-SLOT", names, reason)
    return {slot: names[0] for slot, names in sorted(claimed.items())}


def check_roles(request: Request, active: Sequence[str]) -> None:
    """Report pairs of features that replace the same modules and share no slot, which would say so."""
    for one in active:
        for other, roles in request.index.same_roles.get(one, {}).items():
            if other in active:
                shown = ", ".join(roles[:3]) + (", …" if len(roles) > 3 else "")
                reason = f"{one} and {other} each replace the modules with the role {shown}, and only one can"
                _keep_one(request, "E-ROLE", (one, other), reason)


def check_conflicts(request: Request, active: Sequence[str]) -> None:
    """Report features and flags that a declaration says cannot run together."""
    present = set(active)
    for name in active:
        for other, reason in sorted(request.index.conflicts[name].items()):
            if name < other and other in present:
                request.problem(
                    "E-CONFLICT",
                    name,
                    f"cannot run together with {other}{parenthesized(reason)}",
                    f"drop {request.flag_or_name(name)} or {request.flag_or_name(other)}",
                )
        for conflict in request.index.classes[name].conflicts:
            if conflict.flag and request.holds(conflict):
                cause = request.stands_for(conflict.flag)
                way = f"drop {cause}" if cause else to_avoid(conflict, request.index.flags.get(conflict.flag))
                given = f", which {cause} stands for" if cause else ""
                request.problem(
                    "E-CONFLICT",
                    name,
                    f"cannot run with {condition_text(conflict)}{given}{parenthesized(conflict.reason)}",
                    f"drop {request.flag_or_name(name)}, or {way}",
                )


def check_host(request: Request, active: Sequence[str]) -> None:
    """Report features that take part only in stages which the host never calls."""
    never = request.index.never_called
    for name in active if never else ():
        reached = request.index.classes[name].hooks().keys()
        if reached and reached <= never and not request.index.patches[name]:
            request.problem(
                "E-HOST",
                name,
                f"it works through {' and '.join(sorted(reached))}, which host {request.host} leaves to "
                "your program",
                f"drop {request.flag_or_name(name)}",
            )


def check_stages(request: Request, active: Sequence[str]) -> None:
    """Report stages that several features replace."""
    replaced: dict[str, list[str]] = {}
    for name in active:
        for stage in request.index.replaces[name]:
            replaced.setdefault(stage, []).append(name)
    for stage, names in sorted(replaced.items()):
        if len(names) < 2:
            continue
        shared = set.intersection(*(set(request.index.classes[n].slots) for n in names))
        if shared & request.index.exclusive:
            continue  # the slot they share is reported
        reason = f"{join_names(names)} each replace stage {stage}, and only one can"
        _keep_one(request, "E-STAGE", names, reason)


def collect_patches(request: Request, active: Sequence[str]) -> dict[str, tuple[Patch, ...]]:
    """Return each feature's patches; report symbols replaced twice and unsupported versions."""
    owned: dict[str, tuple[Patch, ...]] = {}
    replaced: dict[str, list[str]] = {}
    for name in active:
        owned[name] = request.index.patches[name]
        for patch in owned[name]:
            if patch.kind == "replace":
                replaced.setdefault(patch.target, []).append(name)
            # One that is not required is left out on other versions.
            asked = patch.versions if patch.required else ""
            bad = unmet(asked, request.kind, request.versions) if asked else None
            if bad is not None:
                request.problem("E-PATCH-VERSION", name, f"its patch of {patch.target}: {bad[0]}", bad[1])
    for target, names in sorted(replaced.items()):
        if len(names) > 1:
            reason = f"{join_names(names)} each replace {target}, and only one can"
            _keep_one(request, "E-PATCH", names, reason)
    return owned


def _keep_one(request: Request, code: str, names: Sequence[str], reason: str) -> None:
    """Report several features of which only one can be active."""
    flags = ", ".join(request.flag_or_name(name) for name in names)
    asked = next((name for name in names if request.causing_flag(name)), names[0])
    request.problem(code, asked, reason, f"keep one of {flags}")


def check_arguments(request: Request, selection: Selection, active: Sequence[str]) -> list[HeldBack]:
    """Run each feature's own check of the arguments.

    Returns:
        Features that nobody asked for and whose check fails, to be left out with those that need them.
    """
    left_out: list[HeldBack] = []
    for name in active:
        cls = request.index.classes[name]
        if cls.validate.__func__ is Feature.validate.__func__:  # type: ignore[attr-defined]
            continue
        try:
            answer: Any = cls.validate(request.args)
            complaints = [answer] if isinstance(answer, str) else [str(complaint) for complaint in answer]
        except (Exception, SystemExit) as error:
            why = request.failure(name, "validate()", error)
            unasked = selection.unasked(name)
            for other in unasked:
                reason = why if other == name else f"it needs {name}, which is left out: {why}"
                left_out.append(HeldBack(other, reason, remedy=request.ways_out(name), broken=True))
            complaints = [] if unasked else [why]
        for complaint in complaints:
            remedy = f"give what it asks for, or drop {request.flag_or_name(name)}"
            request.problem("E-VALIDATE", name, clean(complaint, lines=True), remedy)
    return left_out


def collect_notes(request: Request, order: Sequence[str]) -> list[Note]:
    """Return what host and features say about the arguments, and given flags that a broken one shares."""
    notes: list[Note] = []
    notes += [Note("", sentence) for sentence in request.registry.host_notes(request.host, request.args)]
    for name in order:
        if name not in request.index.with_notes:
            continue
        try:
            answer: Any = request.index.classes[name].notes(request.args)
            sentences = [answer] if isinstance(answer, str) else [str(sentence) for sentence in answer]
        except (Exception, SystemExit) as error:
            sentences = [request.failure(name, "notes()", error)]
        notes += [Note(name, clean(sentence, lines=True)) for sentence in sentences]
    for option, broken in request.registry.shared_with_broken.items():
        if request.given_as(option):
            notes.append(Note(broken.feature, f"{option} is its flag too, but {broken}"))
    return notes
