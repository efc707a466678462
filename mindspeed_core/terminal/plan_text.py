"""A plan as text for a reader."""

from __future__ import annotations

from typing import Any

from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.tables import print_table
from mindspeed_core.terminal.training_flags import Planned
from mindspeed_core.terminal.wrapped import say


def chosen_by_presets(planned: Planned) -> dict[str, dict[str, Any]]:
    """Return the values that presets chose, by argument, each with the preset."""
    return {
        dest: {"value": getattr(planned.args, dest, None), "from": origin}
        for dest, origin in sorted(planned.provenance.items())
        if origin.startswith("preset")
    }


def print_plan(planned: Planned) -> None:
    """Print a plan for a reader."""
    plan = planned.plan
    emit(f"host {plan.host}, optimization level {plan.level}")
    say(planned.provenance["platform"], hang=4)
    if plan.features:
        rows = [
            (index, f.name, f.family, f.level, f"{f.dist} {f.version}", f.why)
            for index, f in enumerate(plan.features, start=1)
        ]
        emit()
        print_table(("#", "active", "family", "level", "package", "why"), rows, heading=(1,))
    else:
        emit("no feature is active")
    if plan.stated_order:
        emit("\norder:")
        for stated in plan.stated_order:
            emit(f"  {stated}")
    if plan.held_back:
        emit("\nheld back:")
        for held in plan.held_back:
            flag = f" ({held.flag})" if held.flag else ""
            say(f"{held.name}{flag}: {held.reason}", indent=2, hang=2)
            if held.remedy:
                emit(f"    -> {held.remedy}")
    if plan.slots:
        emit("\nslots:")
        for slot, feature in sorted(plan.slots.items()):
            emit(f"  {slot}: {feature}")
    if plan.patches:
        emit("\npatches:")
        for patch in plan.patches:
            say(f"{patch.kind} {patch.target} by {patch.owner}: {patch.reason}", indent=2, hang=2)
    presets = chosen_by_presets(planned)
    if presets:
        emit("\nset by presets:")
        for dest, chosen in presets.items():
            emit(f"  {dest} = {chosen['value']} ({chosen['from']})")
    if plan.notes:
        emit("\nnotes:")
        for note in plan.notes:
            emit(f"  {note}")
    for heading, notes in (
        ("change nothing here", [note for note in plan.flag_notes if not note.read_as]),
        ("read as others", [note for note in plan.flag_notes if note.read_as]),
    ):
        if notes:
            emit(f"\nflags that {heading}:" if "change" in heading else f"\nflags {heading}:")
        for said in notes:
            text = f" -> {said.read_as}" if said.read_as else ""
            say(f"{said.flag}{text}" + (f": {said.reason}" if said.reason else ""), indent=2, hang=2)
    emit(f"\ndigest {plan.digest}")
