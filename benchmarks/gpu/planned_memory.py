"""The planned peak of a GPT against the allocator's, without and with fused operators.

The plan runs on shapes alone and sees no device. What it knows is compared with the most bytes that torch's
allocator had handed out after the warm-up; a smoke run has no such allocator, and compares nothing.
"""

from __future__ import annotations

from report import Report
from training_speed import FUSED, HOST, flags_for, train_apart

from mindspeed_tune.driver import Ranks
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import make_plan

BOUND = 0.05
"""Part of the measured peak by which a plan may be off."""


def measure(report: Report) -> None:
    """Plan and train both sides."""
    compared = []
    for side in (HOST, FUSED):
        with report.check(f"{side}: planned") as found:
            planned = planned_bytes(side, smoke=report.smoke)
            found["planned_bytes"] = planned
        if report.rows[-1]["passed"] is False:
            continue
        with report.check(f"{side}: the peak is the planned one") as found:
            measured = train_apart(side, smoke=report.smoke, seconds=report.remaining())["peak_bytes"]
            off = planned / measured - 1.0
            found |= {"planned_bytes": planned, "measured_bytes": measured, "off": off}
            if not report.smoke:
                compared.append(abs(off))
                assert abs(off) <= BOUND, f"{off:+.1%}"
    failed = sum(row["passed"] is False for row in report.rows)
    accuracy = f"planned peaks are off by at most {max(compared):.1%}" if compared else "no peak was compared"
    report.headline = f"{failed} of {len(report.rows)} failed; {accuracy}"


def planned_bytes(side: str, *, smoke: bool) -> float:
    """Return the planned bytes of tensors at the peak of a step, rounded up as an allocator does."""
    command = read_command(["mindspeed-train", *flags_for(side, smoke=smoke)], {})
    # The training's own platform would ask for the device; a dry run has the kernels of one.
    with Ranks(command, platform="fake" if smoke else "fake-cuda") as ranks:
        plan = make_plan(command.text, ranks.run([0]))
    return plan.fullest.fullest.allocated
