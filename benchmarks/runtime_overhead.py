"""Time training through the stages against a hand-written megatron-core loop.

A hand-written loop and the host take turns on one model, in one process, step by step, so that whatever the
machine does meets both; once without features and once with 20 that wrap stages and do nothing. Besides: one
stage call, opening and closing a session, and the wall time of ``mindspeed-features list``.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from machine import write
from trainings import hand_written_step
from turns import Seconds, now, since

from mindspeed_core.feature import Feature, Flag, hookimpl

STEP_OF_REFERENCE_MS = 100.0
FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--micro-batch-size 1 --global-batch-size 2 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --optimizer adam --lr 1e-3 --lr-decay-style constant --mock-data --num-workers 0 "
    "--eval-iters 0 --no-progress --log-interval 1 --use-cpu-initialization --use-distributed-optimizer"
).split()


def noop_features() -> list[type[Feature]]:
    """Twenty features that do nothing; each wraps three stages of building the model and one of training.

    That is how features are: most of their work is done when a step begins. Ten are called once per step and
    ten once per micro-batch, 30 wrapped calls in a step of two micro-batches.
    """
    made: list[type[Feature]] = []
    while_training = ("train_step", "forward_step", "optimizer_step", "get_batch", "log_step", "compute_loss")
    while_building = ("build_layer_spec", "build_model", "build_optimizer", "build_transformer_config")
    for index in range(20):
        stages = [while_training[index % len(while_training)]]
        stages += [while_building[(index + offset) % len(while_building)] for offset in range(3)]
        flag = Flag(f"--noop-{index}", help="Does nothing.")
        body: dict[str, Any] = {stage: hookimpl(wrapper=True)(_pass_through) for stage in stages}
        body.update(name=f"noop-{index}", family="benchmark", summary="Does nothing.", flags=(flag,))
        made.append(type(f"Noop{index}", (Feature,), body))
    return made


def _pass_through(self: Any) -> Any:
    return (yield)


class BothInOne:
    """Outermost wrapper of the step: before each of the host's turns, a hand-written step on the same model.

    The host's turn is everything until the wrapper is entered again: the step, its logging, the loop.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[Seconds]] = {"hand": [], "host": []}
        self.host_started: Seconds | None = None
        self.step_by_hand: Callable[[], None] | None = None

    @hookimpl(wrapper=True)
    def train_step(self, run: Any) -> Any:
        if self.host_started is not None:
            self.seconds["host"].append(since(self.host_started))
        if self.step_by_hand is None:
            samples = run.session.call("build_data_iterators", run=run).train[0]
            log = (run.run_dir / "hand_written.log").open("w")
            self.step_by_hand = hand_written_step(run, samples, log)
        begin = now()
        self.step_by_hand()
        self.seconds["hand"].append(since(begin))
        self.host_started = now()
        return (yield)


def in_one_process(features: int, steps: int, pipe: Connection) -> None:
    """Train through the host with a number of no-op features; send the seconds of all turns."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.registry import Registry
    from mindspeed_train.loop import train

    flags = [*FLAGS, "--train-iters", str(steps), *(f"--noop-{index}" for index in range(features))]
    turns = BothInOne()
    registry = Registry.of(noop_features()[:features])
    with tempfile.TemporaryDirectory() as folder:
        session = prepare(
            [*flags, "--run-dir", folder], registry=registry, extra_plugins=[turns], host="standalone"
        )
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log), session:
            train(session)
    pipe.send(turns.seconds)


def overhead(features: int, steps: int, warmup: int) -> dict[str, float]:
    """Median step by hand and by the host, and the median of their differences, in milliseconds."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_one_process, args=(features, steps, theirs))
    process.start()
    theirs.close()  # so that a child that fails ends the wait
    seconds = ours.recv()
    process.join()
    hand, host = seconds["hand"][warmup:], seconds["host"][warmup:]
    # Turns of one round are neighbours in time, so what the machine does meanwhile cancels in the difference.
    over, over_cpu = (
        statistics.median((mine[clock] - base[clock]) * 1e3 for base, mine in zip(hand, host))
        for clock in (0, 1)
    )
    return {
        "hand_written_ms": statistics.median(wall for wall, _ in hand) * 1e3,
        "host_ms": statistics.median(wall for wall, _ in host) * 1e3,
        "over_ms": over,
        "over_cpu_ms": over_cpu,
        "share_of_100_ms_percent": over / STEP_OF_REFERENCE_MS * 100,
    }


def stage_call_microseconds() -> dict[str, float]:
    """One call of a stage without and with wrappers, in microseconds."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.registry import Registry

    found: dict[str, float] = {}
    for count in (0, 1, 5, 20):
        body = {
            "start_run": hookimpl(wrapper=True)(_pass_through),
            "family": "benchmark",
            "summary": "Nothing.",
        }
        declared = [
            type(f"W{i}", (Feature,), {**body, "name": f"w-{i}", "flags": (Flag(f"--w-{i}", help="x"),)})
            for i in range(count)
        ]
        flags = [*FLAGS, "--train-iters", "1", *(f"--w-{i}" for i in range(count))]
        with prepare(flags, registry=Registry.of(declared), host="standalone") as session:
            session.call("start_run", run=None)
            times = []
            for _ in range(20):
                begin = time.perf_counter()
                for _ in range(500):
                    session.call("start_run", run=None)
                times.append((time.perf_counter() - begin) / 500)
        found[f"{count} wrappers"] = min(times) * 1e6
    return found


def open_close_milliseconds() -> dict[str, float]:
    """Opening and closing a session after everything is imported."""
    from mindspeed_core.activation import prepare

    opened, closed = [], []
    for _ in range(12):
        session = prepare([*FLAGS, "--train-iters", "1"], host="standalone")
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
    rows: dict[str, dict[str, float]] = {}
    print(
        f"{'one step':<20}{'by hand':>10}{'by host':>10}{'over':>10}{'cpu time':>10}{'of a 100 ms step':>18}"
    )
    for count in (0, 20):
        name = f"host, {count} features"
        rows[name] = row = overhead(count, options.steps, options.warmup)
        print(
            f"{name:<20}{row['hand_written_ms']:>7.2f} ms{row['host_ms']:>7.2f} ms{row['over_ms']:>7.3f} ms"
            f"{row['over_cpu_ms']:>7.3f} ms"
            f"{row['share_of_100_ms_percent']:>16.2f} %"
        )
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
