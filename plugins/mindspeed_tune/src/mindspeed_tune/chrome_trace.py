"""Chrome trace of a step's schedule, one lane per pipeline stage; Perfetto and chrome://tracing draw it."""

from __future__ import annotations

from typing import Any

from mindspeed_tune.launch_plan import LaunchPlan
from mindspeed_tune.schedules import FORWARD

_UNTIMED_STEP = 1e6
"""Microseconds that a step without hardware is drawn with."""


def chrome_trace(plan: LaunchPlan) -> dict[str, Any]:
    """Return the trace; without hardware a step is drawn one second long, in relative times."""
    step = plan.step
    factor = 1e6 if step.seconds is not None else _UNTIMED_STEP / (step.timeline.seconds or 1.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "planned step"}}
    ]
    for stage in range(step.timeline.stages):
        names = {"thread_name": {"name": f"stage {stage}"}, "thread_sort_index": {"sort_index": stage}}
        events += [{"ph": "M", "pid": 0, "tid": stage, "name": name, "args": v} for name, v in names.items()]
    chunked = plan.records[0].layout.vpp > 1
    for span in step.timeline.spans:
        letter = "F" if span.direction == FORWARD else "B"
        chunk = f" chunk {span.chunk}" if chunked else ""
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": span.stage,
                "name": f"{letter}{span.microbatch}{chunk}",
                "cat": span.direction,
                "ts": round(span.begin * factor, 3),
                "dur": round((span.end - span.begin) * factor, 3),
                "args": {"micro-batch": span.microbatch, "chunk": span.chunk},
            }
        )
    for name, begin, length in _behind(plan):
        for stage in range(step.timeline.stages):
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "name": name,
                    "cat": "update",
                    "ts": round(begin * factor, 3),
                    "dur": round(length * factor, 3),
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _behind(plan: LaunchPlan) -> list[tuple[str, float, float]]:
    step = plan.step
    if step.seconds is None:
        return []
    begin = step.timeline.seconds
    return [("gradients", begin, step.gradients), ("update", begin + step.gradients, step.update)]
