"""The time of the recorded steps of a trace: operators, waiting by group, idle, the bubble.

Of a CPU the thread that trains is looked at: its operators, and the ranges in which it waits, which
``--profile-level level1`` names by group. Of a CUDA device its kernels are: communication counts as waiting
where no other kernel runs beside it. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_profile.intervals import Intervals, length, union, within, without
from mindspeed_profile.trace_files import Trace, read_traces

WAIT = "wait "
STEP = "step"
PIPELINE = "PIPELINE_MODEL_PARALLEL_GROUP"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMMUNICATION = ("c10d::", "gloo:", "nccl:")


@dataclass(frozen=True)
class Operator:
    """An operator or kernel of the steps: its own time, and how often it ran, in a step."""

    name: str
    milliseconds: float
    calls: float


@dataclass(frozen=True)
class RankAnalysis:
    """The time of a rank's steps, in milliseconds of a step.

    Attributes:
        rank: in the world.
        device: ``"cuda"`` where kernels were recorded, else ``"cpu"``.
        steps: recorded.
        step: how long a step takes.
        compute: operators or kernels that compute.
        waiting: by group, where nothing computes meanwhile.
        idle: neither of them.
        bubble: share of a step that is waited for other pipeline stages.
        named: waits have the names of groups; a CPU's trace below ``level1`` has none.
        top: operators with most time of their own.
    """

    rank: int
    device: str
    steps: int
    step: float
    compute: float
    waiting: Mapping[str, float]
    idle: float
    bubble: float
    named: bool
    top: tuple[Operator, ...]


def analyse_traces(folder: Path, top: int = 10) -> list[RankAnalysis]:
    """Analyse every trace of a folder, in the order of ranks.

    Args:
        folder: what ``--profile`` wrote.
        top: operators that are listed.

    Raises:
        UserError: a file is no trace, or no step is in it.
    """
    return sorted((analyse_trace(one, top) for one in read_traces(folder)), key=lambda one: one.rank)


def analyse_trace(trace: Trace, top: int = 10) -> RankAnalysis:
    """Analyse one trace.

    Raises:
        UserError: no step is in it.
    """
    kernels = [event for event in trace.events if event.get("cat") in _ON_DEVICE]
    steps = [event for event in trace.events if _is_step(event)]
    if not steps and kernels:
        # Without host events a device's trace has no ranges: all of it is one step.
        begin = min(event["ts"] for event in kernels)
        end = max(event["ts"] + event["dur"] for event in kernels)
        steps = [{"name": STEP, "ts": begin, "dur": end - begin}]
    if not steps:
        raise UserError(
            f"{trace.path} has no recorded step: the run ended before one, or another program made it"
        )
    windows = union(map(_times, steps))
    if kernels:
        return _of_device(trace, kernels, len(steps), windows, top)
    return _of_cpu(trace, steps, windows, top)


def _of_cpu(trace: Trace, steps: Sequence[Mapping[str, Any]], windows: Intervals, top: int) -> RankAnalysis:
    thread = steps[0].get("pid"), steps[0].get("tid")
    own = [event for event in trace.events if (event.get("pid"), event.get("tid")) == thread]
    ops = [event for event in own if event.get("cat") == "cpu_op" and not _communicates(event)]
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in own:
        name = str(event.get("name"))
        if event.get("cat") == "user_annotation" and name.startswith(WAIT):
            waits[name.removeprefix(WAIT)].append(_times(event))
    by_group = {group: within(union(times), windows) for group, times in waits.items()}
    waited = union(one for times in by_group.values() for one in times)
    busy = within(union(map(_times, ops)), windows)
    return _result(
        trace,
        "cpu",
        len(steps),
        windows,
        without(busy, waited),
        by_group,
        bool(waits) or trace.world_size == 1,
        _top(_own_times(own, windows), len(steps), top),
    )


def _of_device(
    trace: Trace, kernels: Sequence[Mapping[str, Any]], steps: int, windows: Intervals, top: int
) -> RankAnalysis:
    # Kernels of the last step may end behind its host range.
    windows = union([*windows, (windows[-1][0], max(event["ts"] + event["dur"] for event in kernels))])
    compute = within(union(_times(event) for event in kernels if not _is_collective(event)), windows)
    communicating: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in kernels:
        if _is_collective(event):
            communicating[_group_of(event, trace)].append(_times(event))
    exposed = {
        group: without(within(union(times), windows), compute) for group, times in communicating.items()
    }
    totals: dict[str, list[float]] = defaultdict(list)
    for event in kernels:
        totals[str(event.get("name"))].append(event["dur"])
    return _result(trace, "cuda", steps, windows, compute, exposed, True, _top(totals, steps, top))


def _result(
    trace: Trace,
    device: str,
    steps: int,
    windows: Intervals,
    compute: Intervals,
    waiting: Mapping[str, Intervals],
    named: bool,
    top: tuple[Operator, ...],
) -> RankAnalysis:
    total = length(windows)
    busy = union([*compute, *(one for times in waiting.values() for one in times)])
    scale = 1e3 * steps
    return RankAnalysis(
        rank=trace.rank,
        device=device,
        steps=steps,
        step=total / scale,
        compute=length(compute) / scale,
        waiting={group: length(waiting[group]) / scale for group in sorted(waiting)},
        idle=length(without(windows, busy)) / scale,
        bubble=length(waiting.get(PIPELINE, [])) / total if total else 0.0,
        named=named,
        top=top,
    )


def _own_times(events: Iterable[Mapping[str, Any]], windows: Intervals) -> dict[str, list[float]]:
    """Return the times of operators of one thread without those of the operators and waits inside them."""
    counted = [
        event
        for event in events
        if event.get("cat") == "cpu_op" or str(event.get("name")).startswith((WAIT, *_COMMUNICATION))
    ]
    counted = [event for event in counted if within([_times(event)], windows)]
    counted.sort(key=lambda one: (one["ts"], -one["dur"]))
    own = [float(event["dur"]) for event in counted]
    running: list[tuple[float, int]] = []
    for number, event in enumerate(counted):
        begin, end = _times(event)
        while running and running[-1][0] <= begin:
            running.pop()
        if running:
            own[running[-1][1]] -= event["dur"]
        running.append((end, number))
    found: dict[str, list[float]] = defaultdict(list)
    for event, time in zip(counted, own):
        if event.get("cat") == "cpu_op" and not _communicates(event):
            found[str(event["name"])].append(max(0.0, time))
    return found


def _top(times: Mapping[str, Sequence[float]], steps: int, most: int) -> tuple[Operator, ...]:
    rows = (Operator(name, sum(values) / 1e3 / steps, len(values) / steps) for name, values in times.items())
    return tuple(sorted(rows, key=lambda one: (-one.milliseconds, one.name))[:most])


def _is_step(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and event.get("name") == STEP


def _is_collective(event: Mapping[str, Any]) -> bool:
    return "nccl" in str(event.get("name")).lower()


def _communicates(event: Mapping[str, Any]) -> bool:
    return str(event.get("name")).startswith(_COMMUNICATION)


def _group_of(event: Mapping[str, Any], trace: Trace) -> str:
    args = event.get("args") or {}
    described = args.get("Process Group Description")
    if described and described != "undefined":
        return str(described)
    name = str(args.get("Process Group Name", ""))
    return trace.groups.get(name) or (f"group {name}" if name else "unnamed group")


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def print_analysis(ranks: Sequence[RankAnalysis]) -> None:
    """Print the analyses, one below the other."""
    for rank in ranks:
        emit(f"rank {rank.rank} ({rank.device}), {rank.steps} steps of {rank.step:.2f} ms")
        emit(f"    compute {rank.compute:.2f} ms, idle {rank.idle:.2f} ms, bubble {rank.bubble:.1%}")
        for group, milliseconds in sorted(rank.waiting.items(), key=lambda one: -one[1]):
            emit(f"    waiting {group} {milliseconds:.2f} ms")
        if not rank.named:
            emit("    waits are idle time here: --profile-level level1 names them by group")
        width = max((len(one.name[:60]) for one in rank.top), default=0)
        for one in rank.top:
            emit(f"    {one.name[:60]:<{width}}  {one.milliseconds:9.3f} ms  {one.calls:9.1f} calls")
