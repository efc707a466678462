"""Operators on the device: time against other implementations, every backend against its reference."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kernel_cuda_cases import CUDA_FAMILIES, ON_CUDA, Setting, absent, seconds_on_device
from report import Report

from mindspeed_kernels.conformance import check_backend
from mindspeed_kernels.ops import OPERATORS
from mindspeed_kernels.ops.catalog import load_backends

_SMOKE_OPERATORS = ("rms_norm", "swiglu")
_ALLOWED = 1.05
"""Times the fastest other implementation that an operator may take."""


def measure(report: Report) -> None:
    """Measure time first, as far as packages are installed; then check results."""
    speed(report)
    conformance(report)
    failed = sum(row["passed"] is False for row in report.rows)
    fastest = fastest_of_others(report.rows)
    report.facts["over_the_fastest"] = fastest
    slower = [f"{name} {ratio:.2f}" for name, ratio in fastest.items() if ratio > _ALLOWED]
    among = f"{len(fastest)} operators take over {_ALLOWED:g} x the fastest other's time"
    report.headline = (
        f"{failed} checks failed; {len(slower)} of {among}{': ' if slower else ''}{', '.join(slower)}"
    )


def fastest_of_others(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each operator's time over that of the fastest other implementation that was measured."""
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row.get("ratio") is not None:
            times[row["name"].partition(", theirs")[0]].append((row["ours"], row["theirs"]))
    return {
        name: min(ours for ours, _ in found) / min(theirs for _, theirs in found)
        for name, found in times.items()
    }


def speed(report: Report) -> None:
    """Time both sides of every case in turns; rows hold median seconds, forward and backward."""
    on = Setting("cpu", 128, 256, 512) if report.smoke else ON_CUDA
    for name, reason in absent().items():
        report.row(name, absent=reason)
    for family, cases in CUDA_FAMILIES.items():
        # A package of another version than expected costs its rows only.
        with report.check(f"cases of {family}"):
            for case in cases(on):
                ours, theirs = [], []
                for _ in range(3):
                    case.ours()
                    case.theirs()
                for _ in range(2 if report.smoke else 9):
                    theirs.append(seconds_on_device(case.theirs, device=on.device))
                    ours.append(seconds_on_device(case.ours, device=on.device))
                report.row(
                    case.name,
                    ours=statistics.median(ours),
                    theirs=statistics.median(theirs),
                    unit="s",
                    fastest={"ours": min(ours), "theirs": min(theirs)},
                )


def conformance(report: Report) -> None:
    """Hold every backend that runs on the device against its operator's reference."""
    load_backends()
    names = _SMOKE_OPERATORS if report.smoke else sorted(OPERATORS)
    late: list[str] = []
    for name in names:
        operator = OPERATORS[name]
        for backend in operator.candidates(report.device):
            if operator.samples is None or backend.name == "reference" or backend.available():
                continue
            if report.smoke and backend.name == "compiled":
                continue
            if report.remaining() < 15:
                late.append(f"{name}[{backend.name}]")
                continue
            with report.check(f"{name}[{backend.name}] equals its reference") as found:
                found["served"] = {
                    str(dtype).removeprefix("torch."): check_backend(
                        name, backend.name, device=report.device, dtype=dtype
                    )
                    for dtype in (torch.float32, torch.bfloat16)
                }
    report.facts["left_out"] = {"no time": late}
