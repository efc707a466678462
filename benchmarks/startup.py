"""Time starts: of a training up to its first step, and of the programs that only read declarations.

An interpreter that imports torch and megatron-core takes turns with ``mindspeed-train`` with a small model up
to its first logged step; the bound is on the best difference. ``mindspeed-features list``, ``show`` and
``plan`` (with the training's flags) take turns with an interpreter that does nothing, each a process of its
own; the bound is on the median ``list``. CPU seconds stand beside wall seconds, since a busy machine
stretches the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
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
LIST_BOUND_SECONDS = 0.2
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


def program_seconds(*words: str) -> tuple[float, float]:
    """Wall and CPU seconds of one process from its start to its end."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, check=True, capture_output=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = [usage.ru_utime + usage.ru_stime for usage in (before, after)]
    return wall, used[1] - used[0]


def programs() -> dict[str, tuple[str, ...]]:
    """Return the command of each program that reads declarations alone, and of a bare interpreter."""
    program = str(Path(sys.executable).with_name("mindspeed-features"))
    return {
        "bare interpreter": (sys.executable, "-c", "pass"),
        "list": (program, "list"),
        "show": (program, "show", "moe-core"),
        "plan": (program, "plan", "--", *FLAGS),
    }


def slow_imports(count: int) -> list[tuple[str, float]]:
    """Modules with the most import time of their own in the training program, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-X", "importtime", "-m", "mindspeed_core.train", *FLAGS]
        done = subprocess.run([*command, "--run-dir", folder], check=True, capture_output=True, text=True)
    found = re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s*(\S+)", done.stderr, flags=re.MULTILINE)
    rows = sorted(((name, int(own) / 1e3) for own, name in found), key=lambda row: -row[1])
    return rows[:count]


def _verdict(kept: bool) -> str:
    return "kept  " if kept else "MISSED"


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of trainings; 0 leaves them out")
    parser.add_argument("--programs", type=int, default=15, help="rounds of the programs")
    parser.add_argument("--imports", type=int, default=0, help="show this many slow imports")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Installed packages have bytecode; the first start of a checkout writes it.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    taken: dict[str, list[tuple[float, float]]] = {"bare imports": [], "first step": []}
    commands = programs()
    taken |= {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.programs + 1):
            for name, command in commands.items():
                seconds = program_seconds(*command)
                if index:
                    taken[name].append(seconds)
        if options.rounds:
            first_step_seconds(Path(folder) / "warm")
            bare_seconds()
        for index in range(options.rounds):
            taken["bare imports"].append(bare_seconds())
            taken["first step"].append(first_step_seconds(Path(folder) / str(index)))
    taken = {name: pairs for name, pairs in taken.items() if pairs}
    for name, pairs in taken.items():
        (wall, used), least = (statistics.median(column) for column in zip(*pairs)), min(pairs)[0]
        print(f"{name:<17} median {wall:6.3f} s, least {least:6.3f} s; {used:6.3f} s of CPU time")
    listed = statistics.median(wall for wall, _ in taken["list"])
    installed = json.loads(subprocess.check_output([*commands["list"], "--json"], text=True))
    results: dict[str, Any] = {
        "wall_and_cpu_seconds": taken,
        "features": len(installed["features"]),
        "list_seconds": listed,
        "least_list_seconds": min(taken["list"])[0],
        "list_bound": LIST_BOUND_SECONDS,
        "list_kept": listed <= LIST_BOUND_SECONDS,
    }
    print(
        f"{_verdict(results['list_kept'])} list of {results['features']} features: "
        f"median {listed:.3f} s <= {LIST_BOUND_SECONDS:g} s"
    )
    if options.rounds:
        over, over_used = (
            min(first) - min(bare)
            for first, bare in zip(zip(*taken["first step"]), zip(*taken["bare imports"]))
        )
        kept = over < BOUND_SECONDS
        print(
            f"{_verdict(kept)} first step over bare imports: {over:.2f} s < {BOUND_SECONDS:g} s "
            f"({over_used:.2f} s of CPU time)"
        )
        results |= {"over_bare_imports": over, "cpu_over_bare_imports": over_used}
        results |= {"bound": BOUND_SECONDS, "kept": kept}
    if options.imports:
        results["slow_imports_ms"] = slow_imports(options.imports)
        for name, milliseconds in results["slow_imports_ms"]:
            print(f"    {milliseconds:8.1f} ms  {name}")
    print(f"written to {write('startup', results)}")
    return 0 if results["list_kept"] and results.get("kept", True) else 1


if __name__ == "__main__":
    sys.exit(main())
