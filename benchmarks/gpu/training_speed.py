"""One GPT trained in bf16 by megatron-core's own loop and by the host, without and with features, in one run.

Each training is a process of its own, since memory is compared too. They run in the order plain, host,
features, features, host, plain: a machine that grows slower or faster then shows as the distance between the
two rounds of a side instead of as a difference between sides.

A training is ``python training_speed.py SIDE FILE [--smoke]``; the section starts all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from report import Report
from timeline import StepProfile, shares

PLAIN, HOST, FUSED = "megatron-core's loop", "host without features", "host with features"
FEATURES = (
    *("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-flash-attn"),
    *("--use-fused-cross-entropy", "--use-fused-adam", "--use-gradient-accumulation-fusion"),
    # Without dropout and biases it fuses nothing, and calling what was compiled takes the host longer.
    "--no-bias-dropout-fusion",
)
_SIZES = (
    "--num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 "
    "--vocab-size 32000 --micro-batch-size 1 --global-batch-size 4"
)
_SMALL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 128 --micro-batch-size 1 --global-batch-size 2 --use-cpu-initialization"
)
_MODEL = (
    "--bf16 --use-distributed-optimizer --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--optimizer adam --lr 1e-4 --lr-decay-style constant --mock-data --num-workers 0 --eval-iters 0 "
    "--seed 1234 --no-progress --log-interval 1"
)
_STEPS, _WARMUP = 15, 5
_SMOKE_STEPS, _SMOKE_WARMUP = 5, 1


def flags_for(side: str, *, smoke: bool) -> list[str]:
    """Return the command line of a side; 1.1 billion parameters unless it is a smoke run."""
    flags = [
        "--platform",
        "cpu" if smoke else "cuda",
        *_MODEL.split(),
        *(_SMALL if smoke else _SIZES).split(),
    ]
    flags += ["--train-iters", str(_SMOKE_STEPS if smoke else _STEPS)]
    return [*flags, *FEATURES] if side == FUSED else flags


def measure(report: Report) -> None:
    """Train every side twice and compare them with megatron-core's loop."""
    order = [PLAIN, HOST, FUSED] if report.smoke else [PLAIN, HOST, FUSED, FUSED, HOST, PLAIN]
    rounds: dict[str, list[dict[str, Any]]] = {PLAIN: [], HOST: [], FUSED: []}
    for number, side in enumerate(order):
        # A second round is worth having, a first one of every side is worth more.
        if report.remaining() < (15 if number < 3 else 60):
            report.row(f"{side}: no time", passed=None if rounds[side] else False)
            continue
        with report.check(f"round of {side}") as found:
            figures = train_apart(side, smoke=report.smoke, seconds=report.remaining())
            rounds[side].append(figures)
            found |= figures
    sides = {side: summarize(found) for side, found in rounds.items() if found}
    report.facts |= {"flags": {side: flags_for(side, smoke=report.smoke) for side in rounds}, "sides": sides}
    if PLAIN not in sides:
        report.headline = f"{PLAIN} did not run: nothing to compare with"
        return
    plain = sides[PLAIN]
    for side, figures in sides.items():
        for key, unit in _COMPARED.items():
            if figures.get(key) is not None and (side != PLAIN or key == "mfu"):
                report.row(f"{side}: {key}", ours=figures[key], theirs=plain.get(key), unit=unit)
    _compare_losses(report, sides)
    for side, figures in sides.items():
        share = {kind: round(value, 4) for kind, value in figures["timeline"]["share"].items()}
        report.row(f"{side}: shares of one step", **share)
    shares = [f"{side} {sides[side]['tokens_per_second'] / plain['tokens_per_second']:.3f}" for side in sides]
    report.headline = f"tokens/s over {PLAIN}: {', '.join(shares[1:])}"


_COMPARED = {"step_seconds": "s", "tokens_per_second": "tokens/s", "mfu": "of peak", "peak_bytes": "bytes"}


def _compare_losses(report: Report, sides: Mapping[str, Mapping[str, Any]]) -> None:
    plain = sides[PLAIN]["losses"]
    for side in sides:
        if side == PLAIN:
            continue
        with report.check(f"{side}: losses are those of {PLAIN}") as found:
            pairs = list(zip(sides[side]["losses"], plain))
            found["largest_difference"] = max(abs(ours - theirs) / theirs for ours, theirs in pairs)
            # Sums in another order, in bfloat16, over the steps of the run.
            assert found["largest_difference"] < 2e-2
            assert len(sides[side]["losses"]) == len(plain)


def summarize(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the rounds of a side: the median step of all, the largest peak of memory, the first losses."""
    seconds = statistics.median(second for figures in rounds for second in figures["seconds"])
    first = rounds[0]
    operations, peak = first["flop_per_step"], first["peak_tflops"]
    return {
        "step_seconds": seconds,
        "step_seconds_of_rounds": [statistics.median(figures["seconds"]) for figures in rounds],
        "tokens_per_second": first["tokens_per_step"] / seconds,
        "tflops": operations / seconds / 1e12,
        "mfu": operations / seconds / 1e12 / peak if peak else None,
        "peak_bytes": max(figures["peak_bytes"] for figures in rounds),
        "losses": first["losses"],
        "timeline": first["timeline"],
    }


def train_apart(side: str, *, smoke: bool, seconds: float) -> dict[str, Any]:
    """Run a training in a process of its own.

    Raises:
        RuntimeError: it failed; with the end of its message.
        subprocess.TimeoutExpired: it did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-W", "ignore", __file__, side, str(path), *(["--smoke"] if smoke else [])]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=seconds)
        if done.returncode:
            last = " | ".join(done.stderr.strip().splitlines()[-4:])
            raise RuntimeError(f"status {done.returncode}: {last}")
        figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return figures


class Clock:
    """Seconds of each step after the warm-up, between moments at which the device is idle.

    Attributes:
        seconds: one number for each step.
        peak: most bytes in use after the warm-up.
        profiled: the step behind them, which is recorded kernel by kernel.
        profiled_seconds: that it lasted.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        """Count nothing before the end of the warm-up; take the time of every step but the last one."""
        self.warmup, self.last = warmup, steps - 1
        self.profiled, self.profiled_seconds = StepProfile(), 0.0
        self.steps = 0
        self.seconds: list[float] = []
        self.peak = 0
        self.started = 0.0

    def tick(self, run: Any) -> None:
        """End a step, where one is under way, and begin the next."""
        platform = run.session.platform
        platform.synchronize()
        now = time.perf_counter()
        if self.steps > self.last:
            self.profiled_seconds = now - self.started
            self.profiled.stop()
        elif self.steps > self.warmup:
            self.seconds.append(now - self.started)
        elif self.steps == self.warmup:
            platform.reset_peak_memory()
        if self.steps <= self.last:
            self.peak = platform.peak_memory().bytes
        if self.steps == self.last:
            self.profiled.start()
        self.steps += 1
        self.started = time.perf_counter()


def by_hand(side: str, clock: Clock, *, smoke: bool) -> tuple[Any, list[float]]:
    """Train with megatron-core's schedule, model and optimizer called directly; no stage in a step."""
    from trainings import hand_written_step

    from mindspeed_core.activation import prepare
    from mindspeed_train.loop import setup, teardown

    with prepare(flags_for(side, smoke=smoke), host="standalone") as session:
        run = setup(session)
        with tempfile.TemporaryFile("w+") as log:
            step = hand_written_step(run, _on_device(run.data.train[0], run.dist.device), log)
            for _ in range(run.args.train_iters):
                clock.tick(run)
                step()
            clock.tick(run)
            log.seek(0)
            losses = [float(line.split()[0]) for line in log]
        teardown(session)
    return run, losses


def _on_device(samples: Iterator[Mapping[str, Any]], device: Any) -> Iterator[dict[str, Any]]:
    for sample in samples:
        yield {name: tensor.to(device, non_blocking=True) for name, tensor in sample.items()}


def by_host(side: str, clock: Clock, *, smoke: bool) -> tuple[Any, list[float]]:
    """Train with the host's loop, its logging included."""
    from mindspeed_core.activation import prepare
    from mindspeed_core.feature import hookimpl
    from mindspeed_train.loop import train

    class Ticks:
        """Outermost wrapper of the step: a step lasts until the next one begins."""

        @hookimpl(wrapper=True)
        def train_step(self, run: Any) -> Any:
            """Begin a step."""
            clock.tick(run)
            return (yield)

        @hookimpl(wrapper=True)
        def finish_run(self, run: Any) -> Any:
            """End the last step."""
            clock.tick(run)
            return (yield)

    with tempfile.TemporaryDirectory() as folder:
        flags = [*flags_for(side, smoke=smoke), "--run-dir", folder]
        with (Path(folder) / "log").open("w") as log, redirect_stdout(log):
            with prepare(flags, extra_plugins=[Ticks()], host="standalone") as session:
                run = train(session)
        return run, [numbers["loss"] for numbers in run.history if "loss" in numbers]


def main() -> None:
    """Run one training and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=(PLAIN, HOST, FUSED))
    parser.add_argument("path", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    from mindspeed_megatron.flops import count_flops
    from mindspeed_megatron.instruments.device_peak import peak_tflops

    steps = _SMOKE_STEPS if options.smoke else _STEPS
    clock = Clock(_SMOKE_WARMUP if options.smoke else _WARMUP, steps)
    train = by_hand if options.side == PLAIN else by_host
    run, losses = train(options.side, clock, smoke=options.smoke)
    args = run.args
    operations = count_flops(run.config, seq_length=args.seq_length, vocab_size=args.padded_vocab_size)
    peak, source = peak_tflops(run)
    figures = {
        "seconds": clock.seconds,
        "peak_bytes": clock.peak,
        "losses": losses,
        "timeline": shares(clock.profiled.kernels, clock.profiled_seconds),
        "parameters": sum(parameter.numel() for chunk in run.model for parameter in chunk.parameters()),
        "tokens_per_step": args.global_batch_size * args.seq_length,
        "flop_per_step": operations.model * args.global_batch_size,
        "peak_tflops": peak,
        "peak_source": source,
    }
    options.path.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
