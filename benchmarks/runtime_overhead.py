"""What the runtime costs: training through the stages against a hand-written megatron-core loop.

Three processes train the same small GPT on the same samples and take turns step by step, so that whatever the
machine does meets all of them: a hand-written loop, the host without features, the host with 20 features that
wrap stages and do nothing. Besides: one stage call, opening and closing a session, and the wall time of
``mindspeed-features list``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import write
from trainings import by_hand, by_host, pass_through
from turns import Part, take_turns

from mindspeed_core.feature import Feature, Flag, hookimpl

STEP_OF_REFERENCE_MS = 100.0
FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--micro-batch-size 1 --global-batch-size 2 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --optimizer adam --lr 1e-3 --lr-decay-style constant --mock-data --num-workers 0 "
    "--eval-iters 0 --no-progress --log-interval 1 --use-cpu-initialization --use-distributed-optimizer"
).split()


def stage_call_microseconds() -> dict[str, float]:
    """One call of a stage without and with wrappers, in microseconds."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.registry import Registry

    found: dict[str, float] = {}
    for count in (0, 1, 5, 20):
        body = {
            "should_stop": hookimpl(wrapper=True)(pass_through),
            "family": "benchmark",
            "summary": "Nothing.",
        }
        declared = [
            type(f"W{i}", (Feature,), {**body, "name": f"w-{i}", "flags": (Flag(f"--w-{i}", help="x"),)})
            for i in range(count)
        ]
        flags = [*FLAGS, "--train-iters", "1", *(f"--w-{i}" for i in range(count))]
        with prepare(flags, registry=Registry.of(declared)) as session:

            class Stand:
                """The two attributes that the default reads."""

                args = session.args
                iteration = 1

            run = Stand()
            session.call("should_stop", run=run)
            times = []
            for _ in range(20):
                begin = time.perf_counter()
                for _ in range(500):
                    session.call("should_stop", run=run)
                times.append((time.perf_counter() - begin) / 500)
        found[f"{count} wrappers"] = min(times) * 1e6
    return found


def open_close_milliseconds() -> dict[str, float]:
    """Opening and closing a session after everything is imported."""
    from mindspeed_core.activation import prepare

    opened, closed = [], []
    for _ in range(12):
        session = prepare([*FLAGS, "--train-iters", "1"])
        begin = time.perf_counter()
        session.open()
        middle = time.perf_counter()
        session.close()
        opened.append((middle - begin) * 1e3)
        closed.append((time.perf_counter() - middle) * 1e3)
    # The first round imports what the host needs.
    return {"open": statistics.median(opened[2:]), "close": statistics.median(closed[2:])}


def list_seconds() -> dict[str, float]:
    """Wall time of ``mindspeed-features list``, and of the bare interpreter beside it."""
    program = str(Path(sys.executable).with_name("mindspeed-features"))
    found: dict[str, list[float]] = {"list": [], "interpreter": []}
    for _ in range(9):
        for name, command in (("list", [program, "list"]), ("interpreter", [sys.executable, "-c", ""])):
            begin = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            found[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> int:
    """Measure everything, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=260)
    parser.add_argument("--warmup", type=int, default=20)
    options = parser.parse_args()
    parts: dict[str, Part] = {
        "hand-written loop": (by_hand, (options.steps, FLAGS)),
        "host, 0 features": (by_host, (options.steps, FLAGS)),
        "host, 20 features": (by_host, (options.steps, FLAGS, 20)),
    }
    turns = take_turns(parts, options.steps, options.warmup)
    hand = statistics.median(turns["hand-written loop"]) * 1e3
    rows: dict[str, Any] = {}
    print(f"{'one step':<22}{'median ms':>12}{'over hand-written':>20}{'of a 100 ms step':>20}")
    for name, seconds in turns.items():
        median = statistics.median(seconds) * 1e3
        # Turns of one round are neighbours in time, so their differences cancel what the machine does.
        paired = statistics.median(
            (mine - base) * 1e3 for mine, base in zip(seconds, turns["hand-written loop"])
        )
        share = paired / STEP_OF_REFERENCE_MS * 100
        rows[name] = {"median_ms": median, "over_ms": paired, "share_of_100_ms_percent": share}
        print(f"{name:<22}{median:>12.3f}{paired:>17.3f} ms{share:>18.2f} %")
    calls = stage_call_microseconds()
    print("one stage call        " + "   ".join(f"{name}: {value:.2f} us" for name, value in calls.items()))
    sessions = open_close_milliseconds()
    total = sum(sessions.values())
    print(f"session               open {sessions['open']:.1f} ms, close {sessions['close']:.1f} ms")
    listing = list_seconds()
    print(
        f"mindspeed-features list: {listing['list']:.3f} s (interpreter alone {listing['interpreter']:.3f} s)"
    )
    bounds = {
        "host without features < 0.5 % of 100 ms": rows["host, 0 features"]["share_of_100_ms_percent"] < 0.5,
        "host with 20 features < 0.5 % of 100 ms": rows["host, 20 features"]["share_of_100_ms_percent"] < 0.5,
        "open + close < 100 ms": total < 100,
        "list < 0.3 s": listing["list"] < 0.3,
    }
    for bound, kept in bounds.items():
        print(f"{'kept  ' if kept else 'MISSED'} {bound}")
    path = write(
        "runtime_overhead",
        {
            "hand_written_median_ms": hand,
            "steps": rows,
            "stage_call_microseconds": calls,
            "session_milliseconds": sessions,
            "list_seconds": listing,
            "bounds": bounds,
        },
    )
    print(f"written to {path}")
    return 0 if all(bounds.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
