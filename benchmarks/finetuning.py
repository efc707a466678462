"""Count the positions that finetuning computes: padded, at their own lengths, in groups, packed.

The closed formula says for micro-batches of ``B`` samples filled up to a multiple of 32 that
``1 - sum_b B ceil32(longest_b) / (N B S)`` of the positions are saved. It is compared with the shapes of the
micro-batches of a training, and the losses of a step with those of the same samples filled up to
``--seq-length``.

``python benchmarks/finetuning.py [--samples N]`` prints JSON.
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

from mindspeed_core.activation import activate
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing.model_flags import training_flags
from mindspeed_testing.worlds import run_world
from mindspeed_train.interface import setup, write_index

LENGTH, MICRO, BATCH = 256, 4, 16
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


def write_samples(folder: Path, samples: int) -> None:
    """Write instruction data whose lengths are spread like those of answers: many short, few long."""
    generator = np.random.RandomState(11)
    lengths = np.clip(generator.lognormal(4.0, 0.7, samples), 8, LENGTH).astype(np.int32)
    ids = [generator.randint(3, 127, size=length + 1).astype(np.int32) for length in lengths]
    labels = [np.where(np.arange(len(row)) < len(row) // 3, -100, row).astype(np.int32) for row in ids]
    for name, rows in (("input_ids", ids), ("labels", labels), ("attention_mask", ids)):
        prefix = folder / f"samples_packed_{name}_document"
        prefix.with_suffix(".bin").write_bytes(np.concatenate(rows).tobytes())
        write_index(prefix.with_suffix(".idx"), lengths + 1, np.dtype(np.int32))


def train(folder: str, samples: int) -> dict[str, Any]:
    """Train an epoch of every side in this process."""
    return {name: _epoch(folder, samples, flags) for name, flags in SIDES.items()}


def _epoch(folder: str, samples: int, flags: tuple[str, ...]) -> dict[str, Any]:
    data = (
        *("--data-path", f"{folder}/samples", "--split", "1,0,0", "--is-instruction-dataset"),
        *("--seq-length", str(LENGTH), "--micro-batch-size", str(MICRO), "--global-batch-size", str(BATCH)),
    )
    steps = samples // BATCH
    seen = Seen()
    session = activate(
        training_flags((*data, *flags), steps), platform="cpu", host="standalone", extra_plugins=[seen]
    )
    losses = []
    try:
        with session:
            run = setup(session)
            # Packed rows hold an epoch in fewer steps.
            while seen.tokens < samples * LENGTH and len(losses) < steps:
                losses.append(run.session.call("train_step", run=run).losses["lm loss"])
                run.consumed_train_samples += BATCH
    finally:
        destroy_megatron_state()
    formula = sum(MICRO * -(-longest // 32) * 32 for longest in seen.longest)
    return {
        "steps": len(losses),
        "positions": seen.positions,
        "tokens": seen.tokens,
        "filled": seen.tokens / seen.positions,
        "saved": 1 - seen.positions / (seen.rows * LENGTH),
        "by_formula": 1 - min(formula, seen.rows * LENGTH) / (seen.rows * LENGTH),
        "losses": losses[:4],
    }


def compare(samples: int) -> dict[str, Any]:
    """Return the counts of all sides, and whether they keep what they promise."""
    with tempfile.TemporaryDirectory() as folder:
        write_samples(Path(folder), samples)
        (found,) = run_world(train, 1, folder, samples, timeout=1800)
    exact = all(found[name]["saved"] == found[name]["by_formula"] for name in ("variable", "grouped"))
    pairs = zip(found["padded"]["losses"], found["variable"]["losses"], strict=True)
    apart = max(abs(one - other) / abs(other) for one, other in pairs)
    return {"samples": samples, "sides": found, "formula_holds": exact, "losses_apart": apart}


def main() -> int:
    """Print what was found; the exit status says whether the formula holds and losses agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=512)
    found = compare(parser.parse_args().samples)
    print(json.dumps(found, indent=1))
    return 0 if found["formula_holds"] and found["losses_apart"] < 1e-6 else 1


if __name__ == "__main__":
    sys.exit(main())
