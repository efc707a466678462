"""The host's tokens/s against loops around the same model, and what saving costs while training goes on.

The trainings take turns step by step in one run. Always: the host against a hand-written megatron-core loop.
With ``MEGATRON_LM_PATH`` set: against that checkout's own training loop on the same model, run by the
interpreter ``MEGATRON_LM_PYTHON`` where that is set. Ratios are of medians, by the wall clock and by
CPU time. Then a larger model is trained by the host three times: without saving, with asynchronous and
with synchronous saves. Last, background saves of two models on one and two ranks: the call against one copy
of the state, the steps that follow against others, and torch's `async_save` of the same state between them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import background_saves
import megatron_lm_loop
from machine import write
from turns import Part, Seconds, take_turns

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
LARGER = [*SAVED, *"--hidden-size 768 --num-layers 7 --seq-length 16".split()]
BACKGROUND = {
    "10 million weights": (SAVED, 1),
    "10 million weights, 2 ranks": (SAVED, 2),
    "10 million weights, 2 ranks, not sharded": ([f for f in SAVED if "distributed" not in f], 2),
    "50 million weights": (LARGER, 1),
    "50 million weights, 2 ranks": (LARGER, 2),
}
HAND, HOST, MEGATRON = "hand-written loop", "host", "Megatron-LM's loop"


def compare_loops(steps: int, warmup: int) -> dict[str, dict[str, float]]:
    """Tokens/s of each loop by its median turn, and the host's share of them by both clocks."""
    parts = {HAND: Part("trainings:by_hand", (steps, FLAGS)), HOST: Part("trainings:by_host", (steps, FLAGS))}
    if os.environ.get("MEGATRON_LM_PATH"):
        parts[MEGATRON] = megatron_lm_loop.part(steps, FLAGS)
    turns = take_turns(parts, warmup)
    rows: dict[str, dict[str, float]] = {}
    host = medians(turns[HOST])
    for name, seconds in turns.items():
        median = medians(seconds)
        rows[name] = row = {
            "tokens_per_second": TOKENS / median.wall,
            "tokens_per_cpu_second": TOKENS / median.cpu,
            "host_over_it": median.wall / host.wall,
            "host_over_it_by_cpu_time": median.cpu / host.cpu,
        }
        print(
            f"{name:<20}{row['tokens_per_second']:>10,.0f} tokens/s   host / it {row['host_over_it']:.4f}"
            f"   by CPU time {row['host_over_it_by_cpu_time']:.4f}"
        )
    return rows


def medians(turns: Sequence[Seconds]) -> Seconds:
    """The median turn by each clock."""
    return Seconds(*(statistics.median(column) for column in zip(*turns)))


def compare_saves(steps: int, interval: int) -> dict[str, dict[str, float]]:
    """Measure what saves add to a turn: ``interval`` steps, with the call in the first of them.

    A whole turn belongs to one training, so an asynchronous save has no idle machine to write on.
    """
    with tempfile.TemporaryDirectory() as folder:

        def saving(name: str, *flags: str) -> Part:
            where = ("--save", str(Path(folder) / name), "--keep-last-n", "1")
            flags = (*SAVED, *where, "--save-interval", str(interval), *flags)
            return Part("trainings:by_host", (steps, flags))

        turns = take_turns(
            {
                "no saves": Part("trainings:by_host", (steps, SAVED)),
                "asynchronous saves": saving("async", "--async-save"),
                "synchronous saves": saving("sync"),
            },
            # A turn starts with the step after which a save is called; the first has no call.
            warmup=interval - 1,
            steps_per_turn=interval,
        )
    # The last turn ends with the run: its only step closes everything.
    walls = {name: [step.wall for step in taken][: steps - 2 * interval] for name, taken in turns.items()}
    plain = walls["no saves"]
    usual = statistics.median(plain)
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in walls.items():
        begins = range(0, len(seconds), interval)
        over = [sum(seconds[at : at + interval]) - sum(plain[at : at + interval]) for at in begins]
        rows[name] = row = {
            "step_ms": statistics.median(seconds) * 1e3,
            "call_ms": statistics.median(seconds[at] - plain[at] for at in begins) * 1e3,
            "turn_ms": statistics.median(over) * 1e3,
            "turn_percent": statistics.median(over) / (usual * interval) * 100,
        }
        print(
            f"{name:<20}step {row['step_ms']:7.1f} ms   a save: {row['call_ms']:+8.1f} ms at its call, "
            f"{row['turn_ms']:+8.1f} ms over {interval} steps ({row['turn_percent']:+.1f} %)"
        )
    return rows


def compare_background_saves(rounds: int) -> dict[str, dict[str, float]]:
    """Measure background saves, ours and torch's, of each of `BACKGROUND`."""
    rows = {}
    for name, (flags, ranks) in BACKGROUND.items():
        rows[name] = row = background_saves.measure(flags, rounds, ranks)
        print(
            f"{name:<42}{row['state_mb']:5.0f} MB per rank   copy {row['copy_seconds'] * 1e3:5.0f} ms"
            f"   call {row['call_seconds'] * 1e3:5.0f} ms = {row['call_over_copy']:5.2f} copies,"
            f" steps x {row['following_steps_over_plain']:.3f}"
            f"   torch {row['torch_call_seconds'] * 1e3:5.0f} ms = {row['torch_call_over_copy']:5.2f} copies,"
            f" x {row['torch_following_steps_over_plain']:.3f}"
        )
    return rows


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--no-saves", action="store_true", help="compare the loops alone")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--no-loops", action="store_true", help="measure background saves alone")
    parser.add_argument("--rounds", type=int, default=7, help="of background saves")
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument("--save-interval", type=int, default=10)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    loops: dict[str, dict[str, float]] = {}
    saves: dict[str, dict[str, float]] = {}
    bounds: dict[str, bool] = {}
    if not options.no_loops:
        loops = compare_loops(options.steps, options.warmup)
        bounds["host / hand-written loop >= 0.99"] = loops[HAND]["host_over_it"] >= 0.99
    if not options.no_loops and not options.no_saves:
        saves = compare_saves(options.save_steps, options.save_interval)
        asynchronous, synchronous = (saves[f"{kind}synchronous saves"] for kind in ("a", ""))
        for what, key in (("call", "call_ms"), ("turn", "turn_ms")):
            shorter = asynchronous[key] < synchronous[key]
            bounds[f"an asynchronous save adds less to its {what} than a synchronous one"] = shorter
    background = {} if options.no_saves else compare_background_saves(options.rounds)
    for name, row in background.items():
        bounds[f"{name}: call <= 2 copies"] = row["call_over_copy"] <= 2.0
        # Each rank trains with one thread. Without a core to spare its writer takes from somebody.
        if BACKGROUND[name][1] < (os.cpu_count() or 1):
            bounds[f"{name}: following steps <= 1.02"] = row["following_steps_over_plain"] <= 1.02
    if MEGATRON in loops:
        bounds["host / Megatron-LM's loop >= 1.0"] = loops[MEGATRON]["host_over_it"] >= 1.0
    results = {"loops": loops, "saves": saves, "background_saves": background, "bounds": bounds}
    for bound, kept in bounds.items():
        print(f"{'kept  ' if kept else 'MISSED'} {bound}")
    print(f"written to {write('host', results)}")
    return 0 if all(bounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
