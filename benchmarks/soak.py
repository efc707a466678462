"""Train 20,000 tiny steps with saves, evaluations and restarts, and watch memory, descriptors and threads.

    python benchmarks/soak.py [--steps 20000] [--restarts 3] [--processes 2] [--folder runs/soak]

Attempts save in the foreground and in the background in turns. Writes benchmarks/results/soak.json and ends
with status 1 when a rank is handed out more than 32 bytes per step, when its anonymous memory
would grow by more than 2 % over all steps, or when the number of its descriptors or threads changes.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from command_line import SAVES, TINY, empty, options_of_jobs
from machine import write

from mindspeed_testing.soak import Trend, as_json, soak

FLAGS = [*TINY, *"--eval-iters 1 --eval-interval 100 --use-distributed-optimizer --no-progress".split()]
EVERY = 50
LARGEST_SHARE = 0.02
LARGEST_GROWTH = 32.0
"""Bytes per step. gloo keeps 2 to 4 of each all-gather and reduce-scatter, in loops of these alone too;
whether that explains all of the growth is not known."""


def main() -> int:
    parser = options_of_jobs(__doc__, "soak")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--restarts", type=int, default=3)
    options = parser.parse_args()
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
            print(
                f"{mode}, rank {rank}: handed out {_text(part['memory'])}, anonymous "
                f"{_text(part['resident'])}, descriptors {part['descriptors']}, threads {part['threads']}",
                flush=True,
            )
    write(
        "soak",
        {
            "steps": options.steps,
            "saves": options.steps // EVERY,
            "restarts": options.restarts,
            "seconds": round(time.monotonic() - began),
            "ranks": found,
        },
    )
    steady = all(
        part["memory"]["slope"] - 3 * part["memory"]["error"] < LARGEST_GROWTH
        and Trend(**part["resident"]).share_after(options.steps) < LARGEST_SHARE
        and len(part["descriptors"]) == 1
        and len(part["threads"]) == 1
        for part in found.values()
    )
    return int(not steady)


def _text(trend: dict[str, float]) -> str:
    return f"{trend['slope']:+.0f} ± {trend['error']:.0f} bytes per step at {trend['level'] / 2**20:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main())
