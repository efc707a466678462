"""Pretrain a small GPT on real English text with two processes, from nothing to a sampled continuation.

The text is what every Python installation carries: the interpreter's documentation topics and the docstrings
of the standard library. The model trains with tensor and sequence parallelism, a distributed optimizer and
three fused kernels that a plugin supplies; it is saved halfway, resumed in fresh processes, and sampled.

Run it with ``nox -s demo``, or in an environment that has mindspeed-core and mindspeed-kernels:
``python examples/pretrain_gpt/demo.py [--out FOLDER] [--steps N]``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

STEPS = 7
FEATURES = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-flash-attn")
MODEL = (
    "--num-layers 4 --hidden-size 192 --num-attention-heads 6 --group-query-attention --num-query-groups 2 "
    "--ffn-hidden-size 512 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --seq-length 128 "
    "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"
).split()
TRAINING = (
    "--micro-batch-size 8 --global-batch-size 16 --optimizer adam --lr 2e-3 --min-lr 2e-4 "
    "--lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --clip-grad 1.0 --split 90,10,0 "
    "--seed 1234 --num-workers 0 --log-interval 10"
).split()


def main() -> int:
    """Run every part and print where everything lies."""
    parser = argparse.ArgumentParser(description="Pretrain, resume and sample a small GPT.")
    parser.add_argument("--out", type=Path, help="folder of all files (default runs/demo-<time>)")
    parser.add_argument("--steps", type=int, default=300, help="training steps, at least 20")
    options = parser.parse_args()
    out: Path = options.out or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    print("Pretrain a small GPT on real English text, stop halfway, resume, and let it write.")
    print(f"Two processes on this machine, {options.steps} steps, everything in {out}.")
    say(1, "Collect text", "documentation topics and docstrings of this Python installation")
    from mindspeed_train.text.corpus import write_corpus

    documents, size = write_corpus(out / "corpus")
    print(f"   {documents:,} documents, {size / 2**20:.1f} MiB in {out / 'corpus'}")

    say(2, "Make a dataset", "train a byte-level BPE tokenizer, write Megatron's .bin and .idx")
    program("prepare-text", str(out / "corpus"), "--output-prefix", str(out / "text"), "--vocab-size", "2048")

    data = ["--data-path", str(out / "text"), "--tokenizer-model", str(out / "text.tokenizer.json")]
    data += ["--data-cache-path", str(out / "cache")]
    half = options.steps // 2
    flags = [*MODEL, *TRAINING, *FEATURES, *data, "--run-dir", str(out / "run")]
    flags += ["--train-iters", str(options.steps), "--save", str(out / "checkpoints")]
    flags += ["--eval-interval", str(half), "--eval-iters", "8"]

    say(3, "Look at the plan", "what the flags of the training switch on, before anything starts")
    run([sys.executable, "-m", "mindspeed_core.cli.features", "plan", "--", *flags])

    say(
        4, f"Train steps 1 to {half}", "tensor and sequence parallelism, distributed optimizer, fused kernels"
    )
    # The demo may have run in this folder before.
    torchrun(*flags, "--exit-interval", str(half), "--start-over")

    say(5, f"Resume at step {half}", "fresh processes continue from the checkpoint, bit for bit")
    torchrun(*flags, "--load", str(out / "checkpoints"), "--exit-on-missing-checkpoint")

    say(6, "Sample", "one process loads what two have saved, and continues a prompt")
    prompt = "The module provides a function that"
    program(
        "sample", "--prompt", prompt, "--length", "60", "--top-k", "8",
        *alone(MODEL), *FEATURES, "--load", str(out / "checkpoints"), "--tokenizer-model",
        str(out / "text.tokenizer.json"),
    )  # fmt: skip

    say(7, "Result", "the loss on text that the model has not seen, against a model of single tokens")
    from mindspeed_train.monitoring.curves import draw_loss_curve
    from mindspeed_train.monitoring.records import read_metrics
    from mindspeed_train.text.prepare import unigram_entropy

    entropy = unigram_entropy(out / "text")
    history = read_metrics(out / "run" / "metrics.jsonl")
    validation = [row["validation_loss"] for row in history if "validation_loss" in row]
    draw_loss_curve(history, out / "run" / "loss_curve.png", {"unigram entropy": entropy})
    print(f"   entropy of single tokens  {entropy:.4f} nats per token")
    print(f"   validation loss           {validation[-1]:.4f} nats per token")
    print(f"   {time.monotonic() - started:.0f} s in all; files in {out}:")
    for name in ("corpus", "text.bin", "text.idx", "text.tokenizer.json", "checkpoints"):
        print(f"     {out / name}")
    print(f"     {out / 'run' / 'metrics.jsonl'}\n     {out / 'run' / 'loss_curve.png'}")
    if validation[-1] >= entropy - 0.5:
        print("   the model has not learned: its loss is not clearly below the unigram entropy")
        return 1
    return 0


def alone(flags: Sequence[str]) -> list[str]:
    """The model's flags for one process: a checkpoint loads under any parallel layout."""
    kept = list(flags)
    position = kept.index("--tensor-model-parallel-size")
    del kept[position : position + 2]
    return [flag for flag in kept if flag not in ("--sequence-parallel", "--use-distributed-optimizer")]


def torchrun(*flags: str) -> None:
    """Train on two processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*launcher, "-m", "mindspeed_core.train", *flags], OMP_NUM_THREADS="1")


def program(*arguments: str) -> None:
    """Run ``mindspeed-train``."""
    run([sys.executable, "-m", "mindspeed_core.train", *arguments])


def run(command: Sequence[str], **environment: str) -> None:
    """Run a command, show what it prints, and stop when it fails."""
    finished = subprocess.run(command, env={**os.environ, **environment})
    if finished.returncode:
        sys.exit(finished.returncode)


def say(step: int, title: str, text: str) -> None:
    """Print the heading of a step, and what happens in it."""
    print(f"\n== {step}/{STEPS}  {title}\n   {text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
