"""Kill random parts of training jobs a hundred times at random moments and compare with undisturbed jobs.

    python benchmarks/faults.py [--kills 100] [--processes 2] [--seed 0] [--folder runs/faults] [--only NAME]

Six jobs share the kills: the distributed optimizer, fully sharded parameters and expert parallelism, each
saving in the foreground and in the background. Victims are a rank, the supervisor, a writer of a checkpoint,
or all of them; where the whole job is gone it is started again by the same command. Prints one line per job,
writes benchmarks/results/faults.json and ends with status 1 when anything but time was lost.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from command_line import SAVES, TINY, empty, options_of_jobs
from machine import write

from mindspeed_testing.faults import records, run_undisturbed
from mindspeed_testing.kills import VICTIMS, kill_repeatedly

FLAGS = [
    *TINY,
    *"--train-iters 1000000 --eval-iters 0 --attention-dropout 0.1 --hidden-dropout 0.1".split(),
]
KINDS = {
    "distributed optimizer": ("--use-distributed-optimizer",),
    "fully sharded": ("--use-torch-fsdp2", "--untie-embeddings-and-output-weights"),
    "experts": (
        "--use-distributed-optimizer --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 "
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --swiglu"
    ).split(),
}
SAVING = "--save-interval 2 --keep-last-n 2 --on-save-failure continue --hang-timeout-minutes 0.25".split()
"""A killed writer must not end a job; one that hangs for 15 s is started again."""
PATIENCE = 240.0


def main() -> int:
    parser = options_of_jobs(__doc__, "faults")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="jobs whose name contains this text; no results are written")
    options = parser.parse_args()
    names = [(kind, save) for kind in KINDS for save in SAVES]
    jobs: dict[str, Any] = {}
    for number, (kind, save) in enumerate(names):
        kills = options.kills // len(names) + (number < options.kills % len(names))
        name = f"{kind}, {save}"
        if options.only and options.only not in name:
            continue
        jobs[name] = job = measure(kind, save, kills, options)
        print(
            f"{name}: {job['kills']} kills ({', '.join(f'{n} {who}' for who, n in job['victims'].items())}), "
            f"{job['attempts']} attempts trained, {job['commands']} commands, {job['steps']} steps, "
            f"{job['compared']} compared bit for bit, {len(job['problems'])} problems, {job['seconds']} s",
            flush=True,
        )
        for problem in job["problems"]:
            print(f"  {problem}", flush=True)
    if not options.only:
        total = sum(job["kills"] for job in jobs.values())
        write("faults", {"kills": total, "processes": options.processes, "seed": options.seed, "jobs": jobs})
    return int(any(job["problems"] for job in jobs.values()))


def measure(kind: str, save: str, kills: int, options: argparse.Namespace) -> dict[str, Any]:
    """Kill one job, repeat it undisturbed, and describe what differs."""
    flags = [*FLAGS, *KINDS[kind]]
    folder = empty(options.folder / f"{kind} {save}".replace(" ", "-"))
    began = time.monotonic()
    try:
        report = kill_repeatedly(
            [*flags, *SAVING, *SAVES[save]],
            folder / "killed",
            processes=options.processes,
            kills=kills,
            seed=options.seed + len(folder.name),
            victims=VICTIMS,
            patience=PATIENCE,
        )
    except AssertionError as error:
        return {
            "kills": 0,
            "victims": {},
            "attempts": 0,
            "commands": 0,
            "steps": 0,
            "compared": 0,
            "problems": [str(error)],
            "seconds": round(time.monotonic() - began),
        }
    undisturbed = run_undisturbed(
        flags, folder / "undisturbed", processes=options.processes, steps=report.last
    )
    exact = records(folder / "undisturbed" / "run")
    got = {step: value for step, value in records(folder / "killed" / "run").items() if step <= report.last}
    compared = {step: values for step, values in report.printed.items() if step in undisturbed}
    problems = [*report.lost, *report.contradictions, *report.leftovers, *report.orphans]
    problems += [
        f"step {step}: differs from the undisturbed run"
        for step, values in compared.items()
        if undisturbed[step] != values
    ]
    problems += [] if got == exact else ["metrics.jsonl differs from the undisturbed run"]
    return {
        "kills": report.kills,
        "victims": dict(sorted(report.victims.items())),
        "attempts": len(report.starts),
        "commands": report.commands,
        "steps": report.last,
        "compared": len(compared),
        "problems": problems,
        "seconds": round(time.monotonic() - began),
    }


if __name__ == "__main__":
    sys.exit(main())
