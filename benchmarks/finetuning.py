"""Count the positions that finetuning computes: padded, at their own lengths, in groups, packed.

The closed formula says for micro-batches of ``B`` samples filled up to a multiple of 32 that ``1 - sum_b B
ceil32(longest_b) / (N B S)`` of the positions are saved; packed rows are full but for what fits nowhere. It
is compared with the shapes of the micro-batches of an epoch. The loss of every side is that of the same
epoch, in which weights stay what they were, and the first steps of a training at the samples' own lengths
have the losses of samples filled up to ``--seq-length``.

``python benchmarks/finetuning.py [--samples N] [--write]`` prints JSON, and keeps it in
``results/finetuning.json``. The exit status says whether formula and losses agree.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
from machine import write

from mindspeed_core.activation import activate
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train.interface import setup, write_index

LENGTH, MICRO, BATCH = 256, 4, 16
STEPS = 4
"""Of the trainings whose losses are compared."""
VARIABLE = ("--variable-seq-lengths",)
SIDES = {
    "padded": (),
    "variable": VARIABLE,
    "grouped": (*VARIABLE, "--group-by-length"),
    "packed": ("--pack-samples",),
}


class Seen:
    """Notes positions and tokens of micro-batches, and the longest sample of each."""

    def __init__(self) -> None:
        self.positions = self.tokens = self.rows = 0
        self.longest: list[int] = []

    @hookimpl(wrapper=True)
    def get_batch(self) -> Generator[None, Any, Any]:
        """Look at a micro-batch."""
        batch = yield
        lengths = (~batch.padding_mask).sum(1)
        self.rows += len(lengths)
        self.positions += batch.padding_mask.numel()
        self.tokens += int(lengths.sum())
        self.longest.append(int(lengths.max()))
        return batch


def write_samples(folder: Path, samples: int) -> int:
    """Write instruction data with lengths like those of answers: many short, few long; return the tokens."""
    generator = np.random.RandomState(11)
    lengths = np.clip(generator.lognormal(4.0, 0.7, samples), 8, LENGTH).astype(np.int32)
    ids = [generator.randint(3, 127, size=length + 1).astype(np.int32) for length in lengths]
    labels = [np.where(np.arange(len(row)) < len(row) // 3, -100, row).astype(np.int32) for row in ids]
    for name, rows in (("input_ids", ids), ("labels", labels), ("attention_mask", ids)):
        prefix = folder / f"samples_packed_{name}_document"
        prefix.with_suffix(".bin").write_bytes(np.concatenate(rows).tobytes())
        write_index(prefix.with_suffix(".idx"), lengths + 1, np.dtype(np.int32))
    return int(lengths.sum())


def train(folder: str, tokens: int) -> dict[str, Any]:
    """Run an epoch of every side in this process, and train some steps of two."""
    sides = {name: _epoch(folder, tokens, name) for name in SIDES}
    trained = {name: _losses(folder, SIDES[name]) for name in ("padded", "variable")}
    return {"sides": sides, "trained": trained}


def _line(folder: str, micro: int, batch: int, *flags: str) -> list[str]:
    data = (
        *("--data-path", f"{folder}/samples", "--split", "1,0,0", "--is-instruction-dataset"),
        *("--seq-length", str(LENGTH), "--micro-batch-size", str(micro), "--global-batch-size", str(batch)),
    )
    return training_flags((*data, *flags), 10**4)


def _epoch(folder: str, tokens: int, name: str) -> dict[str, Any]:
    seen = Seen()
    # An epoch of packed rows is no multiple of a batch.
    micro, batch = (1, 1) if name == "packed" else (MICRO, BATCH)
    line = _line(folder, micro, batch, *SIDES[name], "--lr", "0", "--min-lr", "0", "--weight-decay", "0")
    total, trained, steps = 0.0, 0, 0
    try:
        with activate(line, platform="cpu", host="standalone", extra_plugins=[seen]) as session:
            run = setup(session)
            while seen.tokens < tokens:
                result = run.session.call("train_step", run=run)
                run.consumed_train_samples += batch
                total += float(result.losses["lm loss"]) * result.loss_tokens
                trained += result.loss_tokens
                steps += 1
    finally:
        destroy_megatron_state()
    formula = sum(micro * min(-(-longest // 32) * 32, LENGTH) for longest in seen.longest)
    whole = seen.rows * LENGTH
    return {
        "steps": steps,
        "rows": seen.rows,
        "positions": seen.positions,
        "tokens": seen.tokens,
        "trained tokens": trained,
        "filled": seen.tokens / seen.positions,
        "saved": 1 - seen.positions / whole,
        "by formula": 1 - (formula if VARIABLE[0] in SIDES[name] else whole) / whole,
        "loss": total / trained,
    }


def _losses(folder: str, flags: tuple[str, ...]) -> list[float]:
    try:
        with activate(_line(folder, MICRO, BATCH, *flags), platform="cpu", host="standalone") as session:
            run = setup(session)
            found = []
            for _ in range(STEPS):
                found.append(float(run.session.call("train_step", run=run).losses["lm loss"]))
                run.consumed_train_samples += BATCH
            return found
    finally:
        destroy_megatron_state()


def compare(samples: int) -> dict[str, Any]:
    """Return the counts of all sides, and whether they keep what they promise."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_samples(Path(folder), samples)
        (found,) = run_world(train, 1, folder, tokens, timeout=1800)
    sides, trained = found["sides"], found["trained"]
    exact = all(side["saved"] == side["by formula"] and side["tokens"] == tokens for side in sides.values())
    padded = sides["padded"]["loss"]
    return {
        "samples": samples,
        **found,
        "packed positions of the padded ones": sides["packed"]["positions"] / sides["padded"]["positions"],
        "formula holds": exact,
        "losses of an epoch apart": max(abs(side["loss"] / padded - 1) for side in sides.values()),
        "losses of a training apart": max(
            abs(other / one - 1) for one, other in zip(trained["padded"], trained["variable"], strict=True)
        ),
    }


def main() -> int:
    """Print what was found; the exit status says whether the formula holds and losses agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1024, help="A multiple of 64 batches.")
    parser.add_argument("--write", action="store_true", help="Keep the results.")
    asked = parser.parse_args()
    found = compare(asked.samples)
    print(json.dumps(found, indent=1))
    if asked.write:
        write("finetuning", found)
    apart = max(found["losses of an epoch apart"], found["losses of a training apart"])
    return 0 if found["formula holds"] and apart <= 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
