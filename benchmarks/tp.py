"""Count and time tensor parallelism with and without the features of mindspeed-tp.

Two processes train the same small GPT from the same weights. Bytes and calls are the same on every machine;
peak bytes are those of tensors alive during forward and backward of a step. Step times are this machine's,
which should be quiet; the sides take turns. Every goal is printed with what was found, and whether it is met.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tp_exact
from machine import write

from mindspeed_testing.training import SideResult, train_side
from mindspeed_testing.worlds import run_world
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
WIDE = (
    *("--num-layers", "2", "--hidden-size", "768", "--ffn-hidden-size", "2048", "--seq-length", "512"),
    *("--max-position-embeddings", "512", "--use-flash-attn"),
)
"""Products of which a fourth takes longer than a message of gloo between two busy cores (about 0.3 ms)."""
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
    "wide rows": (*ROWS, *WIDE),
    "wide rows, 4 parts": (*ROWS, *WIDE, "--use-ascend-coc", "--coc-parallel-num", "4"),
}
SMALL_HEAD = ("--vocab-size", "256", "--use-flash-attn", "--ffn-hidden-size", "1024")
"""Without large logits and scores of attention: the activations of a whole layer are the peak."""
REFERENCES = {
    **{name: "rows" for name in SIDES if name.startswith("rows")},
    **{name: "sums" for name in SIDES if name.startswith("sums")},
    **{name: "wide rows" for name in SIDES if name.startswith("wide")},
    "rows, recomputed, level 2": "rows, recomputed",
    "sums, recomputed, level 2": "sums, recomputed",
}
GRIDS = ((1, 2), (2, 1), (2, 2), (4, 1))
LARGE = LayerShape(tokens=1, hidden=16384, feed_forward=53248, gated=True, query=16384, key_value=1024)
PUBLISHED = {"16x1": 3.75, "8x2": 2.559, "4x4": 3.076, "2x8": 5.562, "1x16": 11.257}
"""Of the large layer on sixteen ranks, in units of the hidden state."""
RANKS = 2


@dataclass(frozen=True)
class Goal:
    """Goal of a measurement.

    Attributes:
        name: in words.
        found: number or numbers.
        demand: what it should be.
        met: whether it is.
    """

    name: str
    found: Any
    demand: str
    met: bool

    def __str__(self) -> str:
        """Return one line."""
        return f"[{'met' if self.met else 'MISSED'}] {self.name}: {self.found} (goal: {self.demand})"


def trained(flags: Sequence[str], initial: Any = None, *, timed: int = 0) -> SideResult:
    """Train two steps, measure a third one, and time further ones."""
    return train_side(
        (*MODEL, *flags),
        RANKS,
        2,
        initial=initial,
        gradients=False,
        measure=True,
        timed_steps=timed,
        platform="cpu",
    )


def grid_goals() -> list[Goal]:
    """Compare what layers of grids receive with the closed form, and the planner's table."""
    goals = []
    for x, y in GRIDS:
        ranks = run_world(tp_exact.grid_layer, x * y, x, y)
        off = max(abs(found / expected - 1) for found, expected, _ in ranks)
        goals.append(
            Goal(f"bytes of a layer on {x}x{y}, off the closed form", f"{off:.2%}", "0 %", off < 1e-9)
        )
    rows = {f"{x}x{y}": round(volume, 3) for x, y, volume in table(LARGE, 16)}
    plain = one_dimensional(LARGE, 16) / LARGE.hidden
    met = rows == PUBLISHED and plain == PUBLISHED["16x1"]
    goals.append(Goal("volume of h 16384 on 16 ranks by grid", rows, "8x2 2.559, one dimension 3.750", met))
    return goals


def recompute_goals() -> list[Goal]:
    """Count the collectives of a recomputed layer."""
    (first, *_) = run_world(tp_exact.recomputed, RANKS)
    sums = {kind: first["sums", kind][0].get("all_reduce", 0) for kind in ("plain", "level 2")}
    kinds = ("plain", "level 2 again", "level 2")
    units = {kind: sum(first["rows", kind][0].values()) for kind in kinds}
    sent = {(layout, kind): first[layout, kind][1] for layout, kind in first}
    same = all(sent[layout, "level 2"] == sent[layout, "none"] for layout in ("sums", "rows"))
    ratio = 1 - sums["level 2"] / sums["plain"]
    return [
        Goal(
            "all-reduces of a recomputed layer, plain and level 2",
            f"{sums['plain']} -> {sums['level 2']}, -{ratio:.1%}",
            "6 -> 4, -1/3",
            (sums["plain"], sums["level 2"]) == (6, 4),
        ),
        Goal(
            "gathers and scatters of a recomputed layer: plain, level 2, gathered rows kept",
            " -> ".join(str(count) for count in units.values()),
            "14 -> 12 -> 10",
            tuple(units.values()) == (14, 12, 10),
        ),
        Goal(
            "bytes of a step at level 2 and without recomputation, summed and in rows",
            [sent["sums", "level 2"], sent["sums", "none"], sent["rows", "level 2"], sent["rows", "none"]],
            "equal",
            same,
        ),
    ]


def product_goals() -> list[Goal]:
    """Run products in parts on the clock."""
    import torch

    (first, *_) = run_world(tp_exact.clocked_products, RANKS)
    ratios = {f"{kind}, {parts}": round(found.ratio, 4) for (kind, parts), found in first.items()}
    hidden = {f"{kind}, {parts}": found.hidden for (kind, parts), found in first.items()}
    bits = all(torch.equal(found.bits, first[kind, 1].bits) for (kind, _), found in first.items())
    return [
        Goal(
            "time of a product in P parts on the clock, communication as long as the product",
            ratios,
            "at most 1 + 1/P of the longer",
            all(found.ratio <= 1 + 1 / parts + 1e-9 for (_, parts), found in first.items()),
        ),
        Goal(
            "collectives in flight during a part's product",
            hidden,
            "at least P - 1",
            all(found.hidden >= parts - 1 for (_, parts), found in first.items()),
        ),
        Goal(
            "weight gradients of all numbers of parts",
            "same bits" if bits else "other bits",
            "same",
            bits,
        ),
    ]


def uneven_goals() -> list[Goal]:
    """Compare 15 positions on two ranks with 16."""
    (first, *_) = run_world(tp_exact.uneven_layer, RANKS)
    (even, full, _), (odd, padded, _) = first[16], first[15]
    factor = padded / (full * 15 / 16)
    further = sum(odd.values()) - sum(even.values())
    return [
        Goal("bytes of 15 uneven positions on 2 ranks", f"x {factor:.4f}", "x 16/15", padded == full),
        Goal("further collectives of uneven positions", further, "none", odd == even),
    ]


def loss_goals() -> list[Goal]:
    """Weigh the logits of a loss in parts."""
    ((whole, peaks),) = run_world(tp_exact.head_peaks, 1)
    besides = peaks[1] - whole
    shares = {parts: (peak - besides) * parts / whole for parts, peak in peaks.items()}
    return [
        Goal(
            "peak of the logits of a loss in N parts, in N-ths of the whole",
            {parts: round(share, 4) for parts, share in shares.items()},
            "1 within 2 %",
            all(abs(share - 1) <= 0.02 for share in shares.values()),
        )
    ]


def state_goals() -> list[Goal]:
    """Count gathers of optimizer state, and collectives of reports."""
    (found, expected), *_ = run_world(tp_exact.gathers, RANKS, 1000)
    pipelined = ("--pipeline-model-parallel-size", "2", "--async-log-allreduce")
    (reports, *_) = run_world(tp_exact.report_calls, RANKS, *pipelined)
    blocking = reports["blocking reports"] + reports["waited"]
    return [
        Goal("gathers of state in slices, without gloo", found, f"{expected} by formula", found == expected),
        Goal(
            "blocking collectives of reports between the last backward and the end of the update",
            blocking,
            "0",
            blocking == 0,
        ),
    ]


def main() -> int:
    """Run all sides, rounds times in turn, print ratios and goals, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every side")
    parser.add_argument("--timed-steps", type=int, default=5, help="steps timed in a turn")
    given = parser.parse_args()
    goals: list[Goal] = []
    for group in (grid_goals, recompute_goals, product_goals, uneven_goals, loss_goals, state_goals):
        for goal in group():
            print(goal, flush=True)
            goals.append(goal)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    sides: dict[str, SideResult] = {}
    initial: dict[bool, Any] = {}
    for _ in range(given.rounds):
        for name, flags in SIDES.items():
            wide = name.startswith("wide")
            sides[name] = trained(flags, initial.get(wide), timed=given.timed_steps)
            initial.setdefault(wide, sides[name].initial)
            seconds[name].append(sides[name].measures["step_seconds"])
    found = {}
    for name in SIDES:
        own, reference = sides[name].measures, sides[REFERENCES[name]].measures
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
        shown = "  ".join(f"{measure} x {ratio:.3f}" for measure, ratio in ratios.items())
        print(f"{name:<28} {shown}  step_seconds x {time:.3f}")
    for goal in side_goals(found, layer_peaks()):
        print(goal)
        goals.append(goal)
    missed = [goal for goal in goals if not goal.met]
    print(f"{len(goals) - len(missed)} of {len(goals)} goals met")
    if given.write:
        print(f"written to {write('tp', {'goals': [asdict(goal) for goal in goals], 'sides': found}).name}")
    for goal in missed:
        print(goal, file=sys.stderr)
    return 1 if missed else 0


def layer_peaks() -> dict[str, float]:
    """Return peak bytes at level 2 over those of plain full recomputation, by layout."""
    peaks = {}
    for plain in ("rows", "sums"):
        names = f"{plain}, recomputed, level 2", f"{plain}, recomputed"
        level2, full = (trained((*SIDES[name], *SMALL_HEAD)).measures["peak_bytes"] for name in names)
        peaks[plain] = level2 / full
    return peaks


def side_goals(found: dict[str, Any], peaks: dict[str, float]) -> list[Goal]:
    """Compare whole trainings."""
    time = found["wide rows, 4 parts"]["ratios"]["step_seconds"]
    what = "step time of 4 parts on two processes, h 768, 512 tokens"
    goals = [Goal(what, f"x {time:.3f}", "at most x 1.05", time <= 1.05)]
    for plain in ("rows", "sums"):
        level2 = found[f"{plain}, recomputed, level 2"]
        peak, sent = peaks[plain], level2["sent_bytes"] - found[plain]["sent_bytes"]
        goals += [
            Goal(
                f"bytes of a training step at level 2 ({plain}) beyond those without recomputation",
                f"{sent:,.0f}",
                "0",
                sent == 0,
            ),
            Goal(
                f"peak at level 2 ({plain}) against plain full recomputation, a layer being the peak",
                f"x {peak:.3f}",
                "at most x 1",
                peak <= 1,
            ),
        ]
    return goals


if __name__ == "__main__":
    raise SystemExit(main())
