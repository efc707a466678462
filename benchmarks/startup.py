"""Time the start from the command to the first step, over the bare imports of torch and megatron-core.

Three programs take turns: an interpreter that imports torch and megatron-core, ``mindspeed-train`` with a
small model up to its first logged step, and ``mindspeed-features plan`` with the same flags. The bound is on
the best difference of the first two; CPU seconds stand beside wall seconds, since a busy machine
stretches only the latter.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from machine import write

BOUND_SECONDS = 2.0
BARE = "import torch, megatron.core; print('imported', flush=True); input()"
FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --mock-data --num-workers 0 --eval-iters 0 "
    "--no-progress --train-iters 1"
).split()


def seconds_until(beginning: str, command: Sequence[str]) -> tuple[float, float]:
    """Wall and CPU seconds from starting a program to the line of its output that begins so."""
    started = time.perf_counter()
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as program:
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith(beginning):
                wall = time.perf_counter() - started
                used = psutil.Process(program.pid).cpu_times()
                program.communicate("go on\n")
                return wall, used.user + used.system
        raise SystemExit(f"{' '.join(command)}: {program.communicate()[1]}")


def bare_seconds() -> tuple[float, float]:
    """An interpreter with the imports alone."""
    return seconds_until("imported", [sys.executable, "-W", "ignore", "-c", BARE])


def first_step_seconds(folder: Path) -> tuple[float, float]:
    """From starting the program to the line of its first step."""
    command = [sys.executable, "-m", "mindspeed_core.train", *FLAGS, "--run-dir", str(folder)]
    return seconds_until("step ", command)


def plan_seconds() -> float:
    """The program that plans with the same flags."""
    program = str(Path(sys.executable).with_name("mindspeed-features"))
    started = time.perf_counter()
    subprocess.run([program, "plan", "--", *FLAGS], check=True, capture_output=True)
    return time.perf_counter() - started


def slow_imports(count: int) -> list[tuple[str, float]]:
    """Modules with the most import time of their own in the training program, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "importtime", "-m", "mindspeed_core.train", *FLAGS]
        done = subprocess.run([*command, "--run-dir", folder], check=True, capture_output=True, text=True)
    found = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)", done.stderr, flags=re.MULTILINE)
    rows = sorted(((name, int(own) / 1e3) for own, name in found), key=lambda row: -row[1])
    return rows[:count]


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--imports", type=int, default=0, help="show this many slow imports")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    taken: dict[str, list[tuple[float, float]]] = {"bare imports": [], "first step": []}
    plans = []
    with tempfile.TemporaryDirectory() as folder:
        first_step_seconds(Path(folder) / "warm")
        bare_seconds()
        for index in range(options.rounds):
            taken["bare imports"].append(bare_seconds())
            taken["first step"].append(first_step_seconds(Path(folder) / str(index)))
            plans.append(plan_seconds())
    for name, pairs in taken.items():
        wall, used = (statistics.median(column) for column in zip(*pairs))
        print(f"{name:<14} median {wall:6.2f} s, {used:6.2f} s of CPU time")
    print(f"{'plan':<14} median {statistics.median(plans):6.2f} s")
    over, over_used = (
        min(first) - min(bare) for first, bare in zip(zip(*taken["first step"]), zip(*taken["bare imports"]))
    )
    kept = over < BOUND_SECONDS
    print(
        f"{'kept  ' if kept else 'MISSED'} first step over bare imports: {over:.2f} s < {BOUND_SECONDS:g} s "
        f"({over_used:.2f} s of CPU time)"
    )
    results: dict[str, Any] = {
        "wall_and_cpu_seconds": taken,
        "plan_seconds": plans,
        "over_bare_imports": over,
        "cpu_over_bare_imports": over_used,
        "bound": BOUND_SECONDS,
        "kept": kept,
    }
    if options.imports:
        results["slow_imports_ms"] = slow_imports(options.imports)
        for name, milliseconds in results["slow_imports_ms"]:
            print(f"    {milliseconds:8.1f} ms  {name}")
    print(f"written to {write('startup', results)}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
