"""Trainings on two GPUs over NCCL against one process; in a smoke run, two ranks on CPU over gloo."""

from __future__ import annotations

from report import Report

from mindspeed_core.testing.verify import assert_equivalent

_LAYOUTS = {
    "tensor and sequence parallel": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    "data parallel, distributed optimizer": ("--use-distributed-optimizer",),
    "data parallel, overlapped": (
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    ),
}


def measure(report: Report) -> None:
    """Compare each layout with one process."""
    if not report.smoke and len(report.facts["gpus"]) < 2:
        report.facts["not_run"] = report.headline = "one GPU: not run"
        report.row("two GPUs are needed", gpus=len(report.facts["gpus"]))
        return
    for name, flags in list(_LAYOUTS.items())[: 1 if report.smoke else None]:
        with report.check(name) as found:
            verdict = assert_equivalent(
                flags,
                world_size=2,
                baseline_world_size=1,
                tolerance=1e-4,
                platform=report.platform,
                timeout=60.0,
            )
            found |= {"largest_error": verdict.largest_error, "compared": verdict.compared}
    failed = sum(row["passed"] is False for row in report.rows)
    report.headline = f"{failed} of {len(report.rows)} layouts differ from one process"
