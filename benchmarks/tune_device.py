"""Rank candidates on one device by predicted steps, and measure them: ``python benchmarks/tune_device.py``.

Eight candidates of a GPT: two sizes of micro-batches, without and with recomputation, without and with fused
operators. Two of them are run to fit the numbers of the machine; the ranking of all and the planned peak of
memory are judged. ``--platform cpu`` runs a tiny model, to try the code: nothing is judged there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any

from machine import update
from tune_rank import FULL, judged, say

from mindspeed_core.flags.flag_set import known_flags
from mindspeed_core.registry import Registry
from mindspeed_testing.worlds import run_world
from mindspeed_tune.calibrate import by_microbenchmarks, known_run
from mindspeed_tune.candidate import MICRO_BATCH, Candidate
from mindspeed_tune.driver import Ranks, records_of
from mindspeed_tune.fit import fit
from mindspeed_tune.journal import Journal
from mindspeed_tune.launch_command import read_command
from mindspeed_tune.launch_plan import LaunchPlan, make_plan
from mindspeed_tune.measure import Measuring
from mindspeed_tune.microbenchmarks import measure_speeds
from mindspeed_tune.warm_process import WarmProcess

LEAST_RANK, MOST_BYTES = 0.8, 0.05
PLANNED_ON = {"cpu": "fake", "cuda": "fake-cuda"}
_SIZES = {
    "cuda": (
        "--num-layers 8 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 "
        "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
        "--vocab-size 32000"
    ),
    "cpu": (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
        "--max-position-embeddings 128 --vocab-size 256"
    ),
}
MODEL = (
    "--bf16 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --lr 1e-4 --mock-data "
    "--num-workers 0 --eval-iters 0 --train-iters 60 --micro-batch-size 1 --global-batch-size 4"
)
FUSED = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-flash-attn")


def candidates() -> list[Candidate]:
    """Return the eight; the first and the last one differ in everything."""
    return [
        Candidate({MICRO_BATCH: size, **further, **dict.fromkeys(FUSED, fused)})
        for size, further, fused in product((1, 2), ({}, FULL), (False, True))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how well candidates are ranked; status 1 where a bound is missed on a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platform", choices=[*PLANNED_ON], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--print-only", action="store_true", help="do not write benchmarks/results")
    chosen = parser.parse_args(arguments)
    command = read_command(shlex.split(f"mindspeed-train --nproc 1 {MODEL} {_SIZES[chosen.platform]}"))
    flags, tried = known_flags(Registry.discover()), candidates()
    [speeds] = run_world(measure_speeds, 1, chosen.platform, "bfloat16", timeout=300.0)
    start = by_microbenchmarks(speeds, command, None)
    with Journal(None, {}) as journal:
        measuring = Measuring(command, flags, journal, limit=300.0, platform=chosen.platform, say=say)
        measured = measuring.measure(tried, chosen.rounds, memory=True)
    trained = [one for one in tried if not measured[one.name].failure]
    if len(trained) < len(tried):
        failures = {name: one.failure for name, one in measured.items() if one.failure}
        print(f"{len(failures)} of {len(tried)} did not train, and nothing is judged: {failures}", flush=True)
        return 2
    with WarmProcess(PLANNED_ON[chosen.platform]) as process:
        runs = [
            known_run(one.label, one.command(command, flags), process, measured[one.name].best)
            for one in (tried[0], tried[-1])
        ]
        hardware = fit(start, runs).hardware
        plans: dict[str, LaunchPlan] = {}
        for one in tried:
            with Ranks(one.command(command, flags), process=process, reliefs=False) as ranks:
                plans[one.name] = make_plan(command.text, records_of(ranks), hardware)
    names = [one.name for one in tried]
    found: dict[str, Any] = {
        "device": start.name,
        "calibrated_by": [run.name for run in runs],
        "load": os.getloadavg()[0],
        "fitted": judged({name: plan.step.seconds for name, plan in plans.items()}, measured, names),
        "bytes_off": {
            one.label: plans[one.name].fullest.fullest.allocated / (measured[one.name].peak or 1.0) - 1
            for one in tried
        },
        "seconds": {one.label: (plans[one.name].step.seconds, measured[one.name].best) for one in tried},
    }
    for name, value in found.items():
        print(f"{name}: {value}")
    if chosen.platform != "cuda":
        print("nothing is judged: this is no GPU", flush=True)
        return 2
    good = (found["fitted"]["rank_correlation"] or 0.0) >= LEAST_RANK and max(
        map(abs, found["bytes_off"].values())
    ) <= MOST_BYTES
    if not chosen.print_only:
        update("tune_device", {start.name: {**found, "judged": True}})
    print("within all bounds" if good else "a bound is missed", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
