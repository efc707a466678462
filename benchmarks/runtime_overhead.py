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
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from machine import write

from mindspeed_core.feature import Feature, Flag, hookimpl

STEP_OF_REFERENCE_MS = 100.0
FLAGS = (
    "--platform cpu --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 256 "
    "--micro-batch-size 1 --global-batch-size 2 --position-embedding-type rope --attention-dropout 0 "
    "--hidden-dropout 0 --optimizer adam --lr 1e-3 --lr-decay-style constant --mock-data --num-workers 0 "
    "--eval-iters 0 --no-progress --log-interval 1 --use-cpu-initialization --use-distributed-optimizer"
).split()


def noop_features() -> list[type[Feature]]:
    """Twenty features, each wrapping four stages (five of them per micro-batch or step) and doing nothing."""
    made: list[type[Feature]] = []
    per_step = ("train_step", "optimizer_step", "log_step", "finalize_gradients")
    per_microbatch = ("forward_step", "get_batch", "compute_loss")
    per_run = ("build_layer_spec", "build_model", "build_optimizer", "build_transformer_config")
    for index in range(20):
        stages = (
            per_step[index % len(per_step)],
            per_microbatch[index % len(per_microbatch)],
            per_microbatch[(index + 1) % len(per_microbatch)],
            per_run[index % len(per_run)],
        )
        flag = Flag(f"--noop-{index}", help="Does nothing.")
        body: dict[str, Any] = {stage: hookimpl(wrapper=True)(_pass_through) for stage in stages}
        body.update(name=f"noop-{index}", family="benchmark", summary="Does nothing.", flags=(flag,))
        made.append(type(f"Noop{index}", (Feature,), body))
    return made


def _pass_through(self: Any) -> Any:
    return (yield)


class TakeTurns:
    """Outermost wrapper of the step: waits for its turn and reports how long the last one took."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    @hookimpl(wrapper=True)
    def train_step(self) -> Any:
        self.wait()
        return (yield)


class Turns:
    """The child's end: one message per finished turn, one message back to start the next."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.started: float | None = None

    def wait(self) -> None:
        """End the turn and wait for the next."""
        ended = time.perf_counter()
        self.pipe.send(None if self.started is None else ended - self.started)
        self.pipe.recv()
        self.started = time.perf_counter()


def by_host(pipe: Connection, steps: int, features: int) -> None:
    """Train through the host; a turn is one whole iteration of its loop, logging included."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.hosts.standalone.loop import train
    from mindspeed_core.registry import Registry

    turns = Turns(pipe)
    installed = Registry.discover()
    declarations = noop_features()[:features]
    registry = installed if not features else Registry.of(declarations)
    flags = [*FLAGS, "--train-iters", str(steps), *(f"--noop-{index}" for index in range(features))]
    extra = [TakeTurns(turns.wait)]
    with tempfile.TemporaryDirectory() as folder:
        session = prepare([*flags, "--run-dir", folder], registry=registry, extra_plugins=extra)
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log), session:
            train(session)
    turns.wait()


def by_hand(pipe: Connection, steps: int) -> None:
    """Train with megatron-core's parts called directly: what one would write without a framework."""
    from mindspeed_core.activation import prepare

    turns = Turns(pipe)
    # The session only supplies the cpu platform; no stage is called after the parts are built.
    with prepare([*FLAGS, "--train-iters", str(steps)]) as session:
        import torch
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from mindspeed_core.hosts.standalone.loop import setup, teardown

        run = setup(session)
        model, optimizer, scheduler = run.model[0], run.optimizer, run.scheduler
        iterator = run.data.train[0]
        run.config.finalize_model_grads_func = finalize_model_grads
        schedule = get_forward_backward_func()
        args = run.args

        def loss_function(mask: Any, output: Any) -> Any:
            total = (output.view(-1).float() * mask.view(-1)).sum()
            tokens = mask.sum().to(torch.int)
            return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens])}

        def forward(data: Any, chunk: Any) -> Any:
            sample = next(data)
            output = chunk(sample["tokens"], sample["position_ids"], None, labels=sample["labels"])
            return output, lambda out: loss_function(sample["loss_mask"], out)

        with tempfile.TemporaryFile("w") as log:
            for step in range(steps):
                turns.wait()
                model.zero_grad_buffer()
                optimizer.zero_grad()
                reports = schedule(
                    forward_step_func=forward,
                    data_iterator=[iterator],
                    model=[model],
                    num_microbatches=args.num_microbatches,
                    seq_length=args.seq_length,
                    micro_batch_size=args.micro_batch_size,
                    forward_only=False,
                )
                _, norm, _ = optimizer.step()
                scheduler.step(increment=args.global_batch_size)
                total, count = torch.stack([report["lm loss"] for report in reports]).sum(dim=0).tolist()
                print(step, total / count, float(norm), file=log)
        turns.wait()
        teardown(session)


def take_turns(steps: int, warmup: int) -> dict[str, list[float]]:
    """Step the three processes round-robin; seconds of every turn after the warm-up, by name."""
    context = get_context("spawn")
    parts: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "hand-written loop": (by_hand, ()),
        "host, 0 features": (by_host, (0,)),
        "host, 20 features": (by_host, (20,)),
    }
    pipes: dict[str, Connection] = {}
    processes = []
    for name, (target, extra) in parts.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, steps, *extra), daemon=True)
        process.start()
        pipes[name], processes = ours, [*processes, process]
    for pipe in pipes.values():
        assert pipe.recv() is None
    taken: dict[str, list[float]] = {name: [] for name in parts}
    names = list(parts)
    for step in range(steps):
        # The order rotates so that no process always runs after the same neighbour.
        for offset in range(len(names)):
            name = names[(step + offset) % len(names)]
            pipes[name].send("go")
            seconds = pipes[name].recv()
            if step >= warmup:
                taken[name].append(seconds)
    for pipe in pipes.values():
        pipe.send("end")
    for process in processes:
        process.join(timeout=60)
    return taken


def stage_call_microseconds() -> dict[str, float]:
    """One call of a stage without and with wrappers, in microseconds."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.registry import Registry

    found: dict[str, float] = {}
    for count in (0, 1, 5, 20):
        body = {
            "should_stop": hookimpl(wrapper=True)(_pass_through),
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
    turns = take_turns(options.steps, options.warmup)
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
