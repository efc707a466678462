"""A plan as text for a reader: what is active and what is not first, the rest on request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.flags.notes import FlagNote
from mindspeed_core.resolver.plan import Plan
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import Cell, print_heading, print_hint, print_rows, print_section, say
from mindspeed_core.terminal.training_flags import Planned


def chosen_by_presets(planned: Planned) -> dict[str, dict[str, Any]]:
    """Return the values that presets chose, by argument, each with the preset."""
    return {
        dest: {"value": getattr(planned.args, dest, None), "from": origin}
        for dest, origin in sorted(planned.provenance.items())
        if origin.startswith("preset")
    }


def print_plan(planned: Planned, *, everything: bool = False) -> None:
    """Print a plan for a reader.

    Args:
        planned: the plan and the arguments it was made from.
        everything: also packages, order and patches.
    """
    plan = planned.plan
    number = len(plan.features)
    active = f"{number} feature{'' if number == 1 else 's'} active" if number else "no feature is active"
    print_heading(
        f"{active} on platform {plan.platform}", f"host {plan.host}, optimization level {plan.level}"
    )
    say(planned.provenance["platform"], hang=2)
    if plan.features:
        emit()
        print_rows(_rows(plan, everything=everything), indent=2, tabs=False)
    print_section("held back", _held_back(plan))
    print_section("notes", [str(note) for note in plan.notes])
    unchanged = [note for note in plan.flag_notes if not note.read_as]
    translated = [note for note in plan.flag_notes if note.read_as]
    _print_flags("flags that change nothing here", unchanged)
    _print_flags("flags read as others", translated)
    presets = chosen_by_presets(planned).items()
    print_section("set by presets", [f"{dest} = {one['value']} ({one['from']})" for dest, one in presets])
    if everything:
        print_section("order", plan.stated_order)
        print_section("patches", [f"{p.kind} {p.target} by {p.owner}: {p.reason}" for p in plan.patches])
    emit()
    more = [] if everything else _left_out(plan)
    digest = plan.digest if everything else plan.digest[:12]
    print_hint(f"digest {digest}{'; plan --all also shows ' + ', '.join(more) if more else ''}")


def _rows(plan: Plan, *, everything: bool) -> list[tuple[Cell, ...]]:
    """Return a row for each active feature: its place, name, who asked for it, and the slots it fills."""
    rows: list[tuple[Cell, ...]] = []
    for index, feature in enumerate(plan.features, start=1):
        slots = [slot for slot, name in sorted(plan.slots.items()) if name == feature.name]
        facts = [f"fills {', '.join(slots)}"] if slots else []
        if everything:
            facts.append(f"family {feature.family}, level {feature.level}, {feature.dist} {feature.version}")
        cells = (Cell(str(index), "dim"), Cell(feature.name, "name"), Cell(feature.why))
        rows.append((*cells, Cell("; ".join(facts), "dim")))
    return rows


def _held_back(plan: Plan) -> list[str]:
    lines = []
    for held in plan.held_back:
        flag = f" ({held.flag})" if held.flag else ""
        remedy = f" -> {held.remedy}" if held.remedy else ""
        lines.append(f"{held.name}{flag}: {held.reason}{remedy}")
    return lines


def _print_flags(title: str, notes: Sequence[FlagNote]) -> None:
    """Print one line for each flag, with the reason."""
    if notes:
        emit()
        print_heading(title)
        shown = [f"{note.flag}{f' -> {note.read_as}' if note.read_as else ''}" for note in notes]
        rows = [(Cell(text, "name"), note.reason) for text, note in zip(shown, notes)]
        print_rows(rows, indent=2, tabs=False)


def _left_out(plan: Plan) -> list[str]:
    """Return what is printed on request alone, as far as there is any."""
    counted = (
        (len(plan.patches), "patch", "patches"),
        (len(plan.stated_order), "statement of order", "statements of order"),
    )
    return [f"{number} {one if number == 1 else many}" for number, one, many in counted if number]
