"""Train 20,000 tiny steps with saves, evaluations and restarts, and watch memory, descriptors and threads.

    python benchmarks/soak.py [--steps 20000] [--restarts 3] [--processes 2] [--folder runs/soak]

Attempts save in the foreground and in the background in turns. Writes benchmarks/results/soak.json and ends
with status 1 when a rank holds more and more, when so much as one block kept by every save could hide in the
noise, when anonymous memory would grow by more than 1 % over all steps, or when the number of
descriptors or threads changes.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from command_line import SAVES, TINY, empty, options_of_jobs
from machine import write

from mindspeed_testing.soak import ENVIRONMENT, SMALLEST_BLOCK, Trend, as_json, soak

FLAGS = [*TINY, *"--eval-iters 1 --eval-interval 100 --use-distributed-optimizer --no-progress".split()]
EVERY = 50
LARGEST_SHARE = 0.01
"""Of anonymous memory, which also holds gaps between blocks: more of their pages are used once in a while."""
UNITS = {"memory": "bytes", "blocks": "blocks of Python", "resident": "bytes of anonymous memory"}
SMALLEST_LEAK = {"memory": SMALLEST_BLOCK / EVERY, "blocks": 1 / EVERY}
"""Growth per step if each save kept one block, and each evaluation two."""


def main() -> int:
    parser = options_of_jobs(__doc__, "soak")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--restarts", type=int, default=3)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    began = time.monotonic()
    attempts = soak(
        FLAGS,
        empty(options.folder),
        processes=options.processes,
        steps=options.steps,
        restarts=options.restarts,
        every=EVERY,
        modes=list(SAVES.values()),
    )
    found: dict[str, Any] = {}
    for number, mode in enumerate(SAVES):
        for rank in range(options.processes):
            processes = [attempt[rank] for attempt in attempts[number :: len(SAVES)]]
            found[f"{mode}, rank {rank}"] = part = as_json(processes)
            part["problems"] = _problems(part, options.steps)
            print(
                f"{mode}, rank {rank}: "
                + ", ".join(_text(part[name], unit) for name, unit in UNITS.items())
                + f", descriptors {part['descriptors']}, threads {part['threads']}"
            )
            for problem in part["problems"]:
                print(f"  {problem}", flush=True)
    write(
        "soak",
        {
            "steps": options.steps,
            "saves": options.steps // EVERY,
            "restarts": options.restarts,
            "smallest_leak": SMALLEST_LEAK,
            "seconds": round(time.monotonic() - began),
            "ranks": found,
        },
    )
    return int(any(part["problems"] for part in found.values()))


def _problems(part: dict[str, Any], steps: int) -> list[str]:
    problems = []
    for name, leak in SMALLEST_LEAK.items():
        trend = Trend(**part[name])
        if not trend.is_flat():
            problems.append(f"{name}: grows")
        if not trend.excludes(leak):
            problems.append(f"{name}: a growth of {leak:g} per step is not excluded")
    if Trend(**part["resident"]).share_after(steps) > LARGEST_SHARE:
        problems.append(f"resident: would grow by more than {LARGEST_SHARE:.0%} in {steps} steps")
    problems += [f"{name}: changes" for name in ("descriptors", "threads") if len(part[name]) > 1]
    return problems


def _text(trend: dict[str, float], unit: str) -> str:
    return f"{trend['slope']:+.3f} ± {trend['error']:.3f} {unit} per step at {trend['level']:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
