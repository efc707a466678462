"""Figures of what the code declares: the stages of a run, who takes part in them, each pipeline schedule."""

from __future__ import annotations

from importlib import import_module

from shapes import Drawing

from mindspeed_core.feature import PROJECT
from mindspeed_core.hooks import STAGE_MODULES
from mindspeed_core.registry import Registry
from mindspeed_pp.actions import BACKWARD, FORWARD, INPUT_GRADIENT, OVERLAPPED, RECOMPUTE, WEIGHT_GRADIENT
from mindspeed_pp.lint import lint
from mindspeed_pp.rule import Context, Rule
from mindspeed_pp.schedules import BUILT_IN
from mindspeed_pp.simulator import Course, simulate

RANKS, MICROBATCHES = 4, 8
KINDS = {
    FORWARD: ("c0", "forward"),
    BACKWARD: ("c1", "backward"),
    INPUT_GRADIENT: ("c5", "input gradient"),
    WEIGHT_GRADIENT: ("c2", "weight gradient"),
    RECOMPUTE: ("c4", "forward again"),
    OVERLAPPED: ("c3", "forward beside backward"),
}
_LETTER = 7.3


def stages_figure() -> str:
    """Draw the stages in the order in which a run passes them, a row for each area."""
    areas = {
        name.rpartition(".")[2]: [
            stage for stage, value in vars(import_module(name)).items() if hasattr(value, f"{PROJECT}_spec")
        ]
        for name in STAGE_MODULES
    }
    number = sum(map(len, areas.values()))
    drawing = Drawing(
        "The stages of a training run",
        f"{number} stages in {len(areas)} areas, from arguments to the end of a run; a feature wraps or "
        "replaces any of them.",
    )
    y, left = 12.0, 130.0
    for area, stages in areas.items():
        top, x = y, left
        for stage in stages:
            wide = _LETTER * len(stage) + 14
            if x + wide > drawing.width:
                x, y = left, y + 28
            drawing.rect(x, y, wide, 22, "box")
            drawing.text(x + 7, y + 15, stage, "m")
            x += wide + 6
        y += 28
        drawing.text(0, top + 15, area, "h")
        if area == "step":
            drawing.text(0, top + 33, "every step", "q")
        drawing.path(((104, top), (104, y - 4)), "s0")
        y += 10
    drawing.path(((104, y - 14), (104, y - 2)), "i", arrow=True)
    return drawing.svg(y + 2)


def families_figure(registry: Registry) -> str:
    """Draw how many features of each family take part in each area of stages."""
    areas = {
        name.rpartition(".")[2]: {
            stage for stage, value in vars(import_module(name)).items() if hasattr(value, f"{PROJECT}_spec")
        }
        for name in STAGE_MODULES
    }
    members: dict[str, list[set[str]]] = {}
    for record in registry.features.values():
        members.setdefault(record.dist.removeprefix("mindspeed-"), []).append(set(record.cls.hooks()))
    number = sum(map(len, members.values()))
    drawing = Drawing(
        "Features of each family by the stages of a run in which they take part",
        f"{number} features of {len(members)} families; columns are the areas of stages that a run passes: "
        f"{', '.join(areas)}.",
    )
    left, tall, wide = 96.0, 24, 68.0
    for column, area in enumerate(areas):
        x = left + column * wide
        drawing.text(x + wide / 2 - 2, 14, area, "q", "middle")
    drawing.path(((left, 24), (left + len(areas) * wide - 6, 24)), "i", arrow=True)
    for row, (family, features) in enumerate(members.items()):
        y = 32 + row * tall
        drawing.text(0, y + 15, family, "h")
        drawing.text(left - 10, y + 15, str(len(features)), "q", "end")
        for column, stages in enumerate(areas.values()):
            x = left + column * wide
            count = sum(bool(stages & hooked) for hooked in features)
            drawing.rect(x, y, wide - 4, tall - 4, "c0" if count else "box")
            if count:
                drawing.text(x + wide / 2 - 2, y + 14, str(count), "on", "middle")
    y = 32 + len(members) * tall + 16
    drawing.text(left, y, "features of a family that wrap or replace stages there", "q")
    return drawing.svg(y + 8)


def schedule_figures() -> dict[str, str]:
    """Draw every built-in schedule, as the simulator runs it with equal times of all parts."""
    return {f"schedule-{rule.name}": _schedule(rule, course) for rule, course in courses()}


def courses() -> list[tuple[Rule, Course]]:
    """Run every built-in schedule on four ranks with eight micro-batches; times are equal."""
    found = []
    for rule in BUILT_IN:
        schedule = rule.schedule(Context(RANKS, rule.chunks or 2, MICROBATCHES))
        lint(schedule)
        found.append((rule, simulate(schedule)))
    return found


def _schedule(rule: Rule, course: Course) -> str:
    name = rule.name
    drawing = Drawing(
        f"Pipeline schedule {name}",
        f"{RANKS} ranks and {MICROBATCHES} micro-batches: the bubble is {course.bubble_share:.1%} of the "
        f"step, at most {max(course.peaks):g} micro-batches are alive on a rank.",
    )
    left, tall = 52.0, 26
    scale = (drawing.width - left) / course.makespan
    drawing.text(
        0,
        14,
        f"{name}: bubble {course.bubble_share:.1%}, micro-batches alive at most {max(course.peaks):g}",
        "h",
    )
    for rank in range(RANKS):
        y = 26 + rank * (tall + 4)
        drawing.text(0, y + 17, f"rank {rank}", "q")
        drawing.rect(left, y, drawing.width - left, tall, "box")
    for span in course.spans:
        wide = (span.end - span.start) * scale
        if not wide:
            continue
        x, y = left + span.start * scale, 26 + span.rank * (tall + 4)
        second = course.schedule.placement.chunk(span.action.stage) % 2
        drawing.rect(
            x + 0.4, y + 4 * second, max(wide - 0.8, 0.5), tall - 4 * second, KINDS[span.action.op][0]
        )
        if wide > 9:
            drawing.text(x + wide / 2, y + 18, str(span.action.microbatch), "on", "middle")
    y = 26 + RANKS * (tall + 4) + 16
    used = [kind for op, kind in KINDS.items() if any(span.action.op == op for span in course.spans)]
    y = drawing.legend(y, used, left)
    if any(course.schedule.placement.chunk(span.action.stage) for span in course.spans):
        drawing.text(left, y, "lower boxes: a rank's second part of the layers", "q")
        y += 20
    return drawing.svg(y - 8)
