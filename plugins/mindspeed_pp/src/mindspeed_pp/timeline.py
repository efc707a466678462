"""A course of a schedule as text, as a picture, and as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_pp.actions import BACKWARD, FORWARD, INPUT_GRADIENT, OVERLAPPED, RECOMPUTE, WEIGHT_GRADIENT

if TYPE_CHECKING:
    from mindspeed_pp.simulator import Course, Span

_COLORS = {
    FORWARD: "#7aa6da",
    INPUT_GRADIENT: "#8fc77a",
    WEIGHT_GRADIENT: "#e6c07b",
    BACKWARD: "#5fa35f",
    RECOMPUTE: "#b9c9e0",
    OVERLAPPED: "#c49ac7",
}
_NAMES = {
    FORWARD: "forward",
    INPUT_GRADIENT: "input gradient",
    WEIGHT_GRADIENT: "weight gradient",
    BACKWARD: "backward",
    RECOMPUTE: "forward again",
    OVERLAPPED: "forward beside backward",
}


def text_timeline(course: Course, width: int = 100) -> str:
    """Return one line per rank: letters of what runs, dots where it waits.

    Args:
        course: of the simulator.
        width: characters for the whole step.
    """
    scale = width / course.makespan
    lines = []
    for rank in range(course.schedule.ranks):
        cells = ["."] * width
        for span in course.spans:
            if span.rank == rank and span.end > span.start:
                first, last = int(span.start * scale), max(int(span.start * scale) + 1, int(span.end * scale))
                cells[first:last] = _cell(span, last - first)
        lines.append(f"{rank:>3} {''.join(cells[:width])}")
    return "\n".join(lines)


def _cell(span: Span, size: int) -> list[str]:
    chunk = span.action.op.lower() if span.action.op == FORWARD else span.action.op
    label = f"{chunk}{span.action.microbatch}"
    return list(label[:size].ljust(size, "-" if size > len(label) else " "))


def draw(course: Course, path: Path) -> None:
    """Draw the course into a picture; the end of its name says in which format.

    Raises:
        UserError: the file cannot be written, or its format is not known.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = course.schedule
    figure = Figure(figsize=(12, 1.2 + 0.5 * schedule.ranks))
    axes = figure.add_subplot()
    labels = len(course.spans) <= 1500
    for span in course.spans:
        length = span.end - span.start
        if not length:
            continue
        shade = 1.0 if schedule.placement.chunk(span.action.stage) == 0 else 0.65
        axes.barh(
            span.rank, length, left=span.start, height=0.86, color=_COLORS[span.action.op], alpha=shade,
            edgecolor="white", linewidth=0.4,
        )  # fmt: skip
        if labels and length > course.makespan / 120:
            middle = span.start + length / 2
            axes.text(middle, span.rank, str(span.action.microbatch), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set_xlim(0, course.makespan)
    axes.set_xlabel("time (forward pass of a rank's layers = its time in the simulation)")
    axes.set_title(
        f"{schedule.name}: bubble {course.bubble:g} of {course.makespan:g} ({course.bubble_share:.1%})"
    )
    used = [op for op in _NAMES if any(span.action.op == op for span in course.spans)]
    handles = [Patch(color=_COLORS[op], label=_NAMES[op]) for op in used]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=len(used), frameon=False
    )
    try:
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UserError(f"--picture {path}: {error}; name a file that ends in .png or .svg") from error


def trace(course: Course, unit: float = 1000.0, process: int = 0, title: str = "simulated") -> dict[str, Any]:
    """Return the course as trace events, for https://ui.perfetto.dev and chrome://tracing.

    Args:
        course: of the simulator.
        unit: microseconds of one unit of time.
        process: number of the track of this course.
        title: of it.
    """
    name = f"schedule {course.schedule.name}, {title}"
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}},
        *(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": rank,
                "args": {"name": f"pipeline rank {rank}"},
            }
            for rank in range(course.schedule.ranks)
        ),
    ]
    for span in course.spans:
        events.append(
            {
                "name": str(span.action),
                "cat": _NAMES.get(span.action.op, "communication"),
                "ph": "X",
                "pid": process,
                "tid": span.rank,
                "ts": span.start * unit,
                "dur": (span.end - span.start) * unit,
                "args": {"stage": span.action.stage, "microbatch": span.action.microbatch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(course: Course, path: Path) -> None:
    """Write `trace` into a file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(trace(course)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}; name a file that can be written") from error
