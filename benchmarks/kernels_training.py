"""Measure a whole training with the kernels' features: seconds per step and most tensor bytes.

A LLaMA-like model is trained by the host twice, step by step in turns, without any feature and with norms,
activations and attention fused. Bytes are those of tensors alive during forward and backward, counted exactly
in a run of each side by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from machine import write
from turns import Part, take_turns

MODEL = (
    "--platform cpu --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 "
    "--max-position-embeddings 512 --vocab-size 511 --micro-batch-size 1 --global-batch-size 2 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--attention-dropout 0 --hidden-dropout 0 --optimizer adam --lr 1e-3 --lr-decay-style constant "
    "--mock-data --num-workers 0 --eval-iters 0 --use-cpu-initialization"
).split()
FEATURES = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
QUIET = ("--no-progress", "--log-interval", "1")
PLAIN, FUSED = "without features", "with features"


def seconds_per_step(steps: int, warmup: int) -> dict[str, dict[str, float]]:
    """Median wall and CPU seconds of a step of each side, taken in turns."""
    parts = {
        PLAIN: Part("trainings:by_host", (steps, [*MODEL, *QUIET])),
        FUSED: Part("trainings:by_host", (steps, [*MODEL, *QUIET, *FEATURES])),
    }
    return {
        name: {
            "wall_seconds": statistics.median(turn.wall for turn in turns),
            "cpu_seconds": statistics.median(turn.cpu for turn in turns),
        }
        for name, turns in take_turns(parts, warmup).items()
    }


def peak_bytes(features: Sequence[str]) -> float:
    """Most tensor bytes alive during forward and backward of one step."""
    from mindspeed_testing.training import train_side

    side = train_side([*MODEL, *features], 1, 1, gradients=False, measure=True, platform="cpu")
    return side.measures["peak_bytes"]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both sides and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args(argv)
    sides = seconds_per_step(options.steps, options.warmup)
    for name, features in ((PLAIN, ()), (FUSED, FEATURES)):
        sides[name]["peak_tensor_bytes"] = peak_bytes(features)
    for name, figures in sides.items():
        wall, cpu = (figures[clock] * 1e3 for clock in ("wall_seconds", "cpu_seconds"))
        tensors = figures["peak_tensor_bytes"] / 2**20
        print(f"{name:<18}{wall:8.1f} ms, {cpu:8.1f} ms of CPU, {tensors:7.1f} MiB of tensors")
    ratios = {key: sides[FUSED][key] / sides[PLAIN][key] for key in sides[PLAIN]}
    print("with / without    " + ", ".join(f"{key} {ratio:.3f}" for key, ratio in ratios.items()))
    print(f"written to {write('kernels_training', {'sides': sides, 'ratios': ratios}).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
