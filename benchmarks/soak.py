"""Train 20,000 tiny steps with saves, evaluations and restarts, and watch memory, descriptors and threads.

    python benchmarks/soak.py [--steps 20000] [--restarts 3] [--processes 2] [--folder runs/soak]

Attempts save in the foreground and in the background in turns. Writes benchmarks/results/soak.json and ends
with status 1 when a rank is handed out more and more memory, when its anonymous memory would grow by more
than 2 % over all steps, or when the number of its descriptors or threads changes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from machine import write

from mindspeed_testing.soak import Trend, as_json, soak

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --lr-decay-style constant --eval-iters 1 "
    "--eval-interval 100 --use-distributed-optimizer --no-progress"
).split()
EVERY = 50
LARGEST_SHARE = 0.02
MODES = {"foreground": (), "background": ("--async-save",)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "soak")
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    began = time.monotonic()
    attempts = soak(
        FLAGS,
        options.folder,
        processes=options.processes,
        steps=options.steps,
        restarts=options.restarts,
        every=EVERY,
        modes=list(MODES.values()),
    )
    found: dict[str, Any] = {}
    for number, mode in enumerate(MODES):
        for rank in range(options.processes):
            processes = [attempt[rank] for attempt in attempts[number :: len(MODES)]]
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
        part["flat"]
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
