"""Count and time tensor parallelism with and without the features of mindspeed-tp.

Two processes train the same small GPT from the same weights. Bytes and calls are the same on every machine;
peak bytes are those of tensors alive during forward and backward of a step. Step times are this machine's,
which should be quiet; the sides take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from machine import write

from mindspeed_core.testing.training import SideResult, train_side
from mindspeed_tp.volume import LayerShape, one_dimensional, table

MODEL = (
    *("--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "8", "--ffn-hidden-size", "512"),
    *("--seq-length", "256", "--max-position-embeddings", "256", "--position-embedding-type", "rope"),
    *("--micro-batch-size", "2", "--global-batch-size", "4", "--vocab-size", "4096"),
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
)
SUMS = ("--tensor-model-parallel-size", "2")
ROWS = (*SUMS, "--sequence-parallel")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
LEVEL2 = (*FULL, "--optimize-recomp-communication-level", "2")
SIDES: dict[str, tuple[str, ...]] = {
    "rows": ROWS,
    "rows, planned": (*ROWS, "--use-ascend-coc", "--coc-mode", "1"),
    "rows, 2 parts": (*ROWS, "--use-ascend-coc", "--coc-parallel-num", "2"),
    "rows, 4 parts": (*ROWS, "--use-ascend-coc", "--coc-parallel-num", "4"),
    "rows, loss in 4 parts": (*ROWS, "--lm-loss-chunks", "4"),
    "rows, recomputed": (*ROWS, *FULL),
    "rows, recomputed, level 2": (*ROWS, *LEVEL2),
    "rows, as a grid of 1 by 2": (*SUMS, "--tp-2d", "--tp-x", "1", "--tp-y", "2"),
    "sums": SUMS,
    "sums, recomputed": (*SUMS, *FULL),
    "sums, recomputed, level 2": (*SUMS, *LEVEL2),
}
REFERENCES = {
    **{name: "rows" for name in SIDES if name.startswith("rows")},
    **{name: "sums" for name in SIDES if name.startswith("sums")},
    "rows, recomputed, level 2": "rows, recomputed",
    "sums, recomputed, level 2": "sums, recomputed",
}
MOST_TIME = {"rows, 4 parts": 1.05}
"""Ratio of step times that a side may have."""
LARGE = LayerShape(tokens=1, hidden=16384, feed_forward=53248, gated=True, query=16384, key_value=1024)
BEST, PLAIN = 2.559, 3.75
"""Of the large layer on sixteen ranks: the grid of eight by two, and one dimension."""


def trained(flags: Sequence[str], initial: Any = None, *, timed: int = 0) -> SideResult:
    """Train two steps, measure a third one, and time further ones."""
    return train_side(
        (*MODEL, *flags),
        2,
        2,
        initial=initial,
        gradients=False,
        measure=True,
        timed_steps=timed,
        platform="cpu",
    )


def grids() -> dict[str, Any]:
    """Return the planner's table for a large layer; it is the published one, or an error."""
    rows = {f"{x}x{y}": round(volume, 3) for x, y, volume in table(LARGE, 16)}
    plain = one_dimensional(LARGE, 16) / LARGE.hidden
    assert (rows["8x2"], plain) == (BEST, PLAIN), rows
    return {"one dimension": plain, "grids": rows}


def main() -> int:
    """Run all sides, rounds times in turn, print ratios and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every side")
    parser.add_argument("--timed-steps", type=int, default=5, help="steps timed in a turn")
    given = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    measures: dict[str, dict[str, float]] = {}
    initial = trained(SUMS).initial
    for _ in range(given.rounds):
        for name, flags in SIDES.items():
            side = trained(flags, initial, timed=given.timed_steps)
            measures[name] = dict(side.measures)
            seconds[name].append(side.measures["step_seconds"])
    found, failed = {}, []
    for name in SIDES:
        own, reference = measures[name], measures[REFERENCES[name]]
        # The fastest turn of each side is the least disturbed one.
        time = min(seconds[name]) / min(seconds[REFERENCES[name]])
        ratios = {
            measure: own[measure] / reference[measure]
            for measure in ("sent_bytes", "collective_calls", "peak_bytes")
        }
        found[name] = {
            "against": REFERENCES[name],
            **{measure: own[measure] for measure in ratios},
            "step_seconds": min(seconds[name]),
            "ratios": {**ratios, "step_seconds": time},
        }
        if time > MOST_TIME.get(name, float("inf")):
            failed.append(f"{name}: step time x {time:.3f}, at most {MOST_TIME[name]}")
        shown = "  ".join(f"{measure} x {ratio:.3f}" for measure, ratio in ratios.items())
        print(f"{name:<28} {shown}  step_seconds x {time:.3f}")
    for plain in ("rows", "sums"):
        level2 = measures[f"{plain}, recomputed, level 2"]
        if level2["sent_bytes"] != measures[plain]["sent_bytes"]:
            failed.append(f"{plain}: level 2 does not send the bytes of a step without recomputation")
        if level2["peak_bytes"] > measures[f"{plain}, recomputed"]["peak_bytes"]:
            failed.append(f"{plain}: level 2 has a higher peak than plain recomputation")
    volumes = grids()
    print("received per layer, in units of the hidden state:", volumes)
    if given.write:
        print(f"written to {write('tp', {'sides': found, 'volume': volumes}).name}")
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
