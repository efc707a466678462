"""Train a small GPT with 8-bit moments and fused AdamW, kill it, resume it, profile two steps, analyse them.

Two processes of this machine train with ``--quant-states fp8 --optimizer-selection fused_adamw`` on made-up
data, until all of them are killed at once (``kill -9``). New processes resume from the last checkpoint: the
steps that were lost come out with the same losses, bit for bit. Two steps of them are recorded, and
``mindspeed-profile analyse`` says where their time went.

Run it in an environment that has mindspeed-train, mindspeed-optim and mindspeed-profile:
``python examples/eight_bit_moments/demo.py [--out FOLDER]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mindspeed_train.checkpoint.publish import latest_step

PARTS = 3
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 176 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --seq-length 64 --vocab-size 511"
).split()
# So many steps that it always is killed; every attempt draws its samples from as many.
TRAINING = (
    "--platform cpu --nproc 2 --bf16 --use-distributed-optimizer --mock-data --num-workers 0 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0 "
    "--train-iters 20000 --eval-iters 0 --log-interval 1 --no-progress"
).split()
RULE = ("--optimizer", "adam", "--optimizer-selection", "fused_adamw", "--quant-states", "fp8")
SAVE_EVERY, LOST = 20, 3
"""Steps between checkpoints, and those behind the last one when the job is killed, at least."""
RESUMED, WARM, RECORDED = 10, 3, 2
"""Steps after the resumption, of them before the record, and in it."""
LONGEST = 300.0
"""Seconds that the first attempt may take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run every part; returns 0 where the resumed job repeats what was lost, bit for bit."""
    parser = argparse.ArgumentParser(description="Moments of 8 bits: killed, resumed, profiled, analysed.")
    parser.add_argument("--out", type=Path, help="folder of all files (default runs/moments-<time>)")
    options = parser.parse_args(argv)
    out: Path = options.out or Path("runs") / f"moments-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True, exist_ok=True)
    checkpoints = out / "checkpoints"

    say(1, "Train, and kill every process", f"a checkpoint every {SAVE_EVERY} steps")
    saving = ("--save", str(checkpoints), "--save-interval", str(SAVE_EVERY), "--keep-last-n", "2")
    before = train_until_killed(out / "killed", checkpoints, saving)
    saved = published(checkpoints)
    print(f"   killed in step {max(before) + 1}, the last checkpoint is that of step {saved}")

    say(2, "Resume, and record two steps", "new processes, from the last checkpoint")
    begin = saved + WARM
    profile = (
        *("--profile", "--profile-level", "level1", "--profile-with-cpu", "--profile-ranks", "-1"),
        *("--profile-step-start", str(begin), "--profile-step-end", str(begin + RECORDED)),
        *("--profile-save-path", str(out / "profile")),
    )
    loading = ("--load", str(checkpoints), "--exit-on-missing-checkpoint", "--exit-interval", str(RESUMED))
    done = subprocess.run(command(out / "resumed", (*loading, *profile)), env=environment())
    if done.returncode:
        return done.returncode
    after = losses(out / "resumed")
    lost = sorted(before.keys() & after.keys())
    same = all(before[step] == after[step] for step in lost)
    print(f"   steps that were lost and came again: {lost}, losses {'equal' if same else 'NOT equal'}")

    say(3, "Analyse", "mindspeed-profile analyse")
    program = [sys.executable, "-m", "mindspeed_profile.command", "analyse", str(out / "profile")]
    analysed = subprocess.run([*program, "--top", "5"], env=environment())
    print(f"\nfiles in {out}: checkpoints, profile (for Perfetto), killed and resumed (numbers of each step)")
    return 0 if same and analysed.returncode == 0 else 1


def command(folder: Path, flags: Sequence[str]) -> list[str]:
    """Return the command that trains, with its numbers in a folder."""
    program = [sys.executable, "-m", "mindspeed_core.train", *MODEL, *TRAINING, *RULE]
    return [*program, *flags, "--run-dir", str(folder)]


def environment() -> Mapping[str, str]:
    """Return the environment of programs: one thread for each process."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def train_until_killed(folder: Path, checkpoints: Path, flags: Sequence[str]) -> dict[int, float]:
    """Train, kill every process some steps behind a checkpoint, and return the losses until then."""
    job = subprocess.Popen(command(folder, flags), env=environment())
    last = time.monotonic() + LONGEST
    try:
        while max(losses(folder), default=0) < max(published(checkpoints), SAVE_EVERY) + LOST:
            if job.poll() is not None:
                sys.exit(f"the training ended by itself, with status {job.returncode}")
            if time.monotonic() > last:
                sys.exit(f"no checkpoint within {LONGEST:g} s")
            time.sleep(0.02)
    finally:
        kill(job)
    return losses(folder)


def kill(job: subprocess.Popen[bytes]) -> None:
    """Kill a job with all of its processes, which nobody can prepare for."""
    found = []
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()
    psutil.wait_procs(found)


def published(checkpoints: Path) -> int:
    """Return the step of the last checkpoint; 0 without one."""
    return latest_step(checkpoints) or 0


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step that was recorded; the last line of a killed job may be half of one."""
    metrics = folder / "metrics.jsonl"
    if not metrics.exists():
        return {}
    whole = metrics.read_text().rpartition("\n")[0].splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, whole) if "loss" in row}


def say(part: int, title: str, text: str) -> None:
    """Print the heading of a part, and what happens in it."""
    print(f"\n== {part}/{PARTS}  {title}\n   {text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
