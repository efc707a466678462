"""Kills workers of a training job a hundred times at random moments and compares with an undisturbed job.

    python benchmarks/faults.py [--kills 100] [--processes 2] [--seed 0] [--folder runs/faults]

Half of the kills hit a job that saves in the foreground, half one that saves in the background. Prints one
line per job and ends with status 1 when anything but time was lost.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from mindspeed_testing.faults import kill_repeatedly, records, run_undisturbed

FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 64 "
    "--micro-batch-size 1 --mock-data --num-workers 0 --lr 1e-3 --lr-decay-style constant "
    "--train-iters 1000000 --eval-iters 0 --attention-dropout 0.1 --hidden-dropout 0.1 "
    "--use-distributed-optimizer"
).split()
SAVING = ["--save-interval", "2", "--keep-last-n", "2"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs") / "faults")
    options = parser.parse_args()
    failed = False
    for name, extra in {"foreground": [], "background": ["--async-save"]}.items():
        folder = options.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        kills = (options.kills + (name == "foreground")) // 2
        began = time.monotonic()
        report = kill_repeatedly(
            [*FLAGS, *SAVING, *extra],
            folder / "killed",
            processes=options.processes,
            kills=kills,
            seed=options.seed + len(name),
        )
        undisturbed = run_undisturbed(
            FLAGS, folder / "undisturbed", processes=options.processes, steps=report.last
        )
        exact = records(folder / "undisturbed" / "run")
        got = {step: v for step, v in records(folder / "killed" / "run").items() if step <= report.last}
        wrong = [step for step, v in report.printed.items() if step in undisturbed and undisturbed[step] != v]
        problems = [*report.lost, *report.contradictions, *report.leftovers]
        problems += [f"step {step}: differs from the undisturbed run" for step in wrong]
        problems += [] if got == exact else ["metrics.jsonl differs from the undisturbed run"]
        failed = failed or bool(problems)
        print(
            f"{name}: {report.kills} kills, {len(report.starts)} attempts trained, {report.last} steps, "
            f"{len(report.printed)} steps compared bit for bit, {len(problems)} problems, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        for problem in problems:
            print(f"  {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
