"""The numbers of this machine by short runs of the user's own model, as a hardware file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_tune.candidate import (
    CHUNKS,
    CONTEXT,
    EXPERT,
    EXPERT_TENSOR,
    LAYERS_PER_CHUNK,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    Candidate,
)
from mindspeed_tune.driver import Ranks
from mindspeed_tune.extrapolate import whole
from mindspeed_tune.fit import Fit, MeasuredRun, fit
from mindspeed_tune.hardware import ONE_RANK, Hardware
from mindspeed_tune.journal import Journal
from mindspeed_tune.kinds import kinds_of
from mindspeed_tune.launch_command import LaunchCommand
from mindspeed_tune.measure import (
    APART,
    Measured,
    Measuring,
    apart,
    check_one_node,
    check_processors,
    ignored,
)
from mindspeed_tune.microbenchmarks import measure_speeds
from mindspeed_tune.search_report import rank_correlation
from mindspeed_tune.validity import Validity
from mindspeed_tune.warm_process import PlanError, WarmProcess

_ONE: dict[str, Any] = {
    TENSOR: 1,
    SEQUENCE: False,
    PIPELINE: 1,
    CONTEXT: 1,
    EXPERT: None,
    EXPERT_TENSOR: None,
    LAYERS_PER_CHUNK: None,
    CHUNKS: None,
}
_SPEEDS = "speeds"
_LEAST = 0.8
"""Rank correlation of predicted and measured runs below which no ranking by time is promised."""


@dataclass(frozen=True)
class Calibration:
    """The outcome of a calibration.

    Attributes:
        start: the numbers by microbenchmarks alone.
        dtype: of the runs, ``bfloat16`` or ``float32``: products of another one are not measured.
        fit: the numbers, and how well they explain the runs.
        runs: measured steps by layout.
        notes: what a user should know, one sentence each.
        trusted: rounds agree and the runs are ranked as they were measured.
    """

    start: Hardware
    dtype: str
    fit: Fit
    runs: Mapping[str, Measured]
    notes: tuple[str, ...]
    trusted: bool


def layouts_to_run(validity: Validity, world_size: int) -> dict[str, Candidate]:
    """Return the layouts in which each number shows, by name: one for each dimension that may be started.

    Data parallelism alone comes first; tensor parallelism always follows where there are two ranks.
    """
    half = 2
    tried = {"data parallel": Candidate(dict(_ONE))}
    if world_size > 1:
        tried |= {
            "tensor parallel": Candidate({**_ONE, TENSOR: half, SEQUENCE: True}),
            "pipeline": Candidate({**_ONE, PIPELINE: half}),
            "context parallel": Candidate({**_ONE, CONTEXT: half}),
            "experts": Candidate({**_ONE, EXPERT: half}),
        }
    return {name: one for name, one in tried.items() if validity.args_of(one) is not None}


def calibrate(
    command: LaunchCommand,
    *,
    folder: Path | None,
    layers: int | None,
    limit: float,
    platform: str | None,
    target: str,
    elsewhere: Hardware | None,
    say: Callable[[str], None],
) -> Calibration:
    """Run a model in a few layouts and fit the machine's numbers to its steps.

    Args:
        command: the user's, of one node.
        folder: of a journal; None keeps nothing.
        layers: of a smaller model, where the whole one does not fit; None for the whole one.
        limit: seconds after which a run hangs.
        platform: that trains; None for what the command says.
        target: the dry run's platform.
        elsewhere: whose numbers hold for what one node cannot tell: links between nodes and reserved memory.
        say: takes lines about the progress.

    Raises:
        UserError: nothing trains, there are more ranks than processors, or they are of several nodes.
    """
    from mindspeed_testing.worlds import run_world

    check_one_node(command)
    notes = [check_processors(command.world_size)] if platform in (None, "cpu") else []
    notes += ignored(command.arguments)
    registry = Registry.discover()
    flags = known_flags(registry)
    smaller = {} if layers is None else {"--num-layers": layers}
    command = Candidate(smaller).command(command, flags)
    validity = Validity(registry, command, target)
    chosen = layouts_to_run(validity, command.world_size)
    if not chosen:
        first = next(iter(validity.refused.values()))
        raise UserError(f"no layout of this command can be run for a calibration: {first.reason}")
    args = validity.args_of(next(iter(chosen.values())))
    dtype = str(args.params_dtype).removeprefix("torch.")
    facts = {"calibrated command": list(command.text), "ranks": command.world_size, "layers": layers}
    with Journal(folder, facts) as journal:
        speeds = journal.get(_SPEEDS, dtype)
        if speeds is None:
            say("microbenchmarks")
            [speeds, *_] = run_world(measure_speeds, command.world_size, platform, dtype, timeout=300.0)
            journal.put(_SPEEDS, dtype, speeds)
        measuring = Measuring(command, flags, journal, limit=limit, platform=platform, say=say)
        by_name = {candidate.name: name for name, candidate in chosen.items()}
        say(f"short runs: {', '.join(chosen)}")
        found = measuring.settle(list(chosen.values()), unsure=apart)
    runs = {by_name[name]: one for name, one in found.items()}
    notes += [f"{name} could not be run: {one.failure}" for name, one in runs.items() if one.failure]
    trained = {name: one for name, one in runs.items() if not one.failure}
    if not trained:
        raise UserError(f"nothing trains here: {next(iter(runs.values())).failure}")
    start = by_microbenchmarks(speeds, command, elsewhere)
    say("dry runs of the same layouts")
    with WarmProcess(target) as process:
        known = [
            known_run(name, chosen[name].command(command, flags), process, one.best)
            for name, one in trained.items()
        ]
    return _judged(start, dtype, fit(start, known), known, runs, notes)


def _judged(
    start: Hardware,
    dtype: str,
    found: Fit,
    known: Sequence[MeasuredRun],
    runs: Mapping[str, Measured],
    notes: list[str],
) -> Calibration:
    noisy = {name: one for name, one in runs.items() if one.seconds and one.typical > APART}
    trusted = not noisy
    if noisy:
        name, worst = max(noisy.items(), key=lambda item: item[1].typical)
        notes.append(
            f"rounds of {name} differ by {worst.typical:.0%} at a load of {worst.load:.1f} on "
            f"{os.cpu_count()} "
            "processors: rankings by these numbers are not to be trusted; calibrate when the machine is quiet"
        )
    ranks = rank_correlation([(run.predicted(found.hardware), run.seconds) for run in known])
    if ranks is not None and ranks < _LEAST:
        trusted = False
        notes.append(
            f"the fitted numbers rank the runs by {ranks:.2f} only: the model of a step does not "
            "explain this "
            "machine, and rankings by time are not to be trusted"
        )
    return Calibration(start, dtype, found, runs, tuple(filter(None, notes)), trusted)


def known_run(name: str, command: LaunchCommand, process: WarmProcess, seconds: float) -> MeasuredRun:
    """Return a run with the records of a rank of every kind.

    Raises:
        UserError: it cannot be planned, though it was measured.
    """
    try:
        with Ranks(command, process=process, reliefs=False) as ranks:
            [first] = ranks.run([0])
            kinds = kinds_of(first.layout, first.stages)
            others = ranks.run([kind.representative for kind in kinds if kind.representative != 0])
    except PlanError as error:
        raise UserError(f"{name} trains, but cannot be planned, which a calibration needs: {error}") from None
    by_stage = {stage: record for kind, record in zip(kinds, (first, *others)) for stage in kind.stages}
    records = [by_stage[stage] for stage in range(first.layout.pp)]
    return MeasuredRun(name, records, [whole(record, stage) for stage, record in enumerate(records)], seconds)


def by_microbenchmarks(
    speeds: Mapping[str, Any], command: LaunchCommand, elsewhere: Hardware | None
) -> Hardware:
    """Return the numbers that a fit begins with: those of the microbenchmarks."""
    devices = command.ranks_per_node or command.world_size
    latency = speeds["latency"] or 10e-6
    link = speeds["link"] or 50e9
    on_cpu = speeds["platform"] == "cpu"
    return Hardware(
        name=str(speeds["name"]),
        # Ranks on CPU share the memory of the machine.
        memory=speeds["memory"] / (devices if on_cpu else 1),
        flops=dict.fromkeys(("bfloat16", "float16", "float32"), speeds["flops"]),
        memory_bandwidth=speeds["memory_bandwidth"],
        launch=speeds["launch"],
        devices=devices,
        within_node=link,
        between_nodes=link if elsewhere is None else elsewhere.between_nodes,
        latency_within_node=latency,
        latency_between_nodes=3 * latency if elsewhere is None else elsewhere.latency_between_nodes,
        matrix=1.0,
        attention=1.0,
        memory_share=1.0,
        link_share=1.0,
        context=0.0 if on_cpu else 2.0**30 if elsewhere is None else elsewhere.context,
        per_group=0.0 if on_cpu or elsewhere is None else elsewhere.per_group,
        sources={},
        unverified=(),
        collectives=dict(speeds["collectives"]),
        update_bandwidth=speeds["update_bandwidth"],
    )


def hardware_file(calibrated: Calibration, command: Sequence[str]) -> str:
    """Return a calibration as the text of a hardware file."""
    one, unconstrained = calibrated.fit.hardware, calibrated.fit.unconstrained
    runs = ", ".join(
        f"{name} {run.best * 1e3:.3g} ms (spread {run.spread:.0%}, load {run.load:.1f}, "
        f"predicted {calibrated.fit.errors[name]:+.1%})"
        for name, run in calibrated.runs.items()
        if name in calibrated.fit.errors
    )
    fitted = f"fitted to short runs: {runs}"
    looped = "a microbenchmark in a loop"
    keys = {
        "device.bf16": "flops",
        "device.fp32": "flops",
        "device.memory_bandwidth": "memory_bandwidth",
        "device.launch": "launch",
        "links.latency_within_node": "latency_within_node",
    }
    several = any(name != "data parallel" for name in calibrated.runs)
    sources = {key: looped if of in unconstrained else fitted for key, of in keys.items()}
    sources["links.within_node"] = looped if several else ONE_RANK
    if one.update_bandwidth:
        sources["device.update_bandwidth"] = looped
    sources |= {f"collectives.{name}": looped for name in one.collectives}
    sources["device.memory"] = "what the platform reports"
    other = "device.bf16" if calibrated.dtype == "float32" else "device.fp32"
    sources[other] = f"assumed: the runs compute in {calibrated.dtype}"
    unverified = [key for key, of in keys.items() if of in unconstrained or key == other]
    unverified += [
        "links.between_nodes",
        "links.latency_between_nodes",
        "reserved.context",
        "reserved.per_group",
    ]
    unverified += [] if several else ["links.within_node"]
    lines = [
        "# Written by mindspeed-tune calibrate -- " + " ".join(command),
        *(f"# {note}" for note in calibrated.notes),
        "",
        "[device]",
        f"name = {json.dumps(one.name)}",
        f'memory = "{one.memory:.0f} B"',
        f'bf16 = "{one.flops["bfloat16"] / 1e9:.6g} GFLOP/s"',
        f'fp32 = "{one.flops["float32"] / 1e9:.6g} GFLOP/s"',
        f'memory_bandwidth = "{one.memory_bandwidth / 1e9:.6g} GB/s"',
        *([f'update_bandwidth = "{one.update_bandwidth / 1e9:.6g} GB/s"'] if one.update_bandwidth else ()),
        f'launch = "{one.launch * 1e6:.6g} us"',
        "",
        "[node]",
        f"devices = {one.devices}",
        "",
        "[links]",
        f'within_node = "{one.within_node / 1e9:.6g} GB/s"',
        f'between_nodes = "{one.between_nodes / 1e9:.6g} GB/s"',
        f'latency_within_node = "{one.latency_within_node * 1e6:.6g} us"',
        f'latency_between_nodes = "{one.latency_between_nodes * 1e6:.6g} us"',
        "",
        *_collectives(one),
        "# The speeds above are what a training reaches, so every part of them is reached.",
        "[efficiency]",
        "matrix = 1.0",
        "attention = 1.0",
        "memory = 1.0",
        "links = 1.0",
        "",
        "[reserved]",
        f'context = "{one.context:.0f} B"',
        f'per_group = "{one.per_group:.0f} B"',
        "",
        *(
            ()
            if calibrated.trusted
            else ("[calibration]", f"untrusted = {json.dumps('; '.join(calibrated.notes))}", "")
        ),
        "[sources]",
        *(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in sources.items()),
        "",
        "[unverified]",
        f"keys = {json.dumps(unverified)}",
    ]
    return "\n".join(lines) + "\n"


def _collectives(one: Hardware) -> list[str]:
    if not one.collectives:
        return []
    lines = [f"{name} = {ratio:.4g}" for name, ratio in one.collectives.items()]
    return ["# Bytes a second, as multiples of those of an all-reduce.", "[collectives]", *lines, ""]


def write_hardware(text: str, path: Path) -> None:
    """Write a hardware file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--tune-out {path}: cannot be written ({error}); name another file") from None
