"""The host's tokens/s against loops around the same model, and what saving costs while training goes on.

The trainings take turns step by step in one run. Always: the host against a hand-written megatron-core loop.
With ``MEGATRON_LM_PATH`` set: against that checkout's own training loop on the same model. Then a larger
model is trained by the host three times: without saving, with asynchronous and with synchronous saves; the
turn that holds the call of a save and the turns after it are compared with the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import write
from megatron_lm_loop import by_megatron_lm
from trainings import by_hand, by_host
from turns import Part, take_turns

# Megatron-LM's tokenizer without text adds one id; both then pad to 512.
FLAGS = (
    "--platform cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 "
    "--vocab-size 511 --micro-batch-size 1 --global-batch-size 2 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --optimizer adam --lr 1e-3 --lr-decay-style constant "
    "--mock-data --num-workers 0 --eval-iters 0 --no-progress --log-interval 1 --use-cpu-initialization "
    "--use-distributed-optimizer"
).split()
TOKENS = 2 * 256
SAVED = [*FLAGS, "--hidden-size", "384", "--num-layers", "6", "--seq-length", "64"]
HAND, HOST, MEGATRON = "hand-written loop", "host", "Megatron-LM's loop"


def compare_loops(steps: int, warmup: int) -> dict[str, dict[str, float]]:
    """Tokens/s of each loop, and the host's share of it over pairs of neighbouring turns."""
    parts: dict[str, Part] = {HAND: (by_hand, (steps, FLAGS)), HOST: (by_host, (steps, FLAGS))}
    if os.environ.get("MEGATRON_LM_PATH"):
        parts[MEGATRON] = (by_megatron_lm, (steps, FLAGS))
    turns = take_turns(parts, steps, warmup)
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in turns.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(turns[HOST], seconds))
        rows[name] = {"tokens_per_second": TOKENS / statistics.median(seconds), "host_over_it": ratio}
        print(f"{name:<20}{rows[name]['tokens_per_second']:>12,.0f} tokens/s   host / it {ratio:.4f}")
    return rows


def compare_saves(steps: int, warmup: int, interval: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a turn without a save, of the turn with the call, and of the turns after it."""
    with tempfile.TemporaryDirectory() as folder:

        def saving(name: str, *flags: str) -> list[str]:
            where = ("--save", str(Path(folder) / name), "--keep-last-n", "1")
            return [*SAVED, *where, "--save-interval", str(interval), *flags]

        turns = take_turns(
            {
                "no saves": (by_host, (steps, SAVED)),
                "asynchronous saves": (by_host, (steps, saving("async", "--async-save"))),
                "synchronous saves": (by_host, (steps, saving("sync"))),
            },
            steps,
            warmup,
        )
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in turns.items():
        # A turn ends where the next step begins, so the save after step n belongs to turn n.
        over = [mine - base for mine, base in zip(seconds, turns["no saves"])]
        numbered = list(enumerate(over, start=warmup + 1))
        # The last step's save is at the end of the run.
        calls = [value for step, value in numbered if step % interval == 0 and step < steps]
        after = [
            value for step, value in numbered if 1 <= step % interval <= interval // 2 and step > interval
        ]
        usual = statistics.median(turns["no saves"])
        rows[name] = {
            "step_ms": statistics.median(seconds) * 1e3,
            "call_ms": statistics.median(calls) * 1e3,
            "after_ms_per_step": statistics.mean(after) * 1e3,
            "increase_over_all_steps_percent": statistics.mean(over) / usual * 100,
        }
        row = rows[name]
        print(
            f"{name:<20}step {row['step_ms']:7.1f} ms   call {row['call_ms']:+8.1f} ms   steps after it "
            f"{row['after_ms_per_step']:+7.1f} ms   all {row['increase_over_all_steps_percent']:+6.1f} %"
        )
    return rows


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--no-saves", action="store_true", help="compare the loops alone")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--save-steps", type=int, default=60)
    parser.add_argument("--save-interval", type=int, default=10)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    loops = compare_loops(options.steps, options.warmup)
    bounds: dict[str, Any] = {"host / hand-written loop >= 0.99": loops[HAND]["host_over_it"] >= 0.99}
    saves: dict[str, dict[str, float]] = {}
    if not options.no_saves:
        saves = compare_saves(options.save_steps, options.warmup, options.save_interval)
        calls = {name: row["call_ms"] for name, row in saves.items()}
        shorter = calls["asynchronous saves"] < calls["synchronous saves"]
        bounds["an asynchronous save holds the run up less than a synchronous one"] = shorter
    if MEGATRON in loops:
        bounds["host / Megatron-LM's loop >= 1.0"] = loops[MEGATRON]["host_over_it"] >= 1.0
    for bound, kept in bounds.items():
        print(f"{'kept  ' if kept else 'MISSED'} {bound}")
    print(f"written to {write('host', {'loops': loops, 'saves': saves, 'bounds': bounds})}")
    return 0 if all(bounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
