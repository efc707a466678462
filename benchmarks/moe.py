"""Count what layers of experts send and keep, with and without the features of mindspeed-moe.

Two processes train the same small GPT from the same weights. Bytes and calls are the same on every machine;
peak bytes are those of tensors alive during forward and backward of a step. Exposed communication is that of
one layer on a clock that moves with its work (`moe_layer`), kept bytes are those at the shape of DeepSeek-V3
(`moe_kept`), loads of ranks are planned for experts whose loads follow Zipf's law. Step times are this
machine's; the sides take turns.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

import moe_kept
import moe_layer
from machine import write

from mindspeed_moe.expert_map.planning import (
    contiguous_placement,
    greedy_placement,
    rank_loads,
    rows_with_copies,
)
from mindspeed_testing import run_world
from mindspeed_testing.training import SideResult, train_side

LAYERS, HIDDEN, WIDTH, TOPK, EXPERTS, RANKS = 4, 256, 64, 8, 16, 2
"""Experts are a quarter as wide as hidden states, and each token goes to eight: about DeepSeek-V3's shape."""
MODEL = (
    *("--num-layers", str(LAYERS), "--hidden-size", str(HIDDEN), "--seq-length", "256"),
    *("--max-position-embeddings", "256", "--micro-batch-size", "2", "--global-batch-size", "4"),
    *("--num-experts", str(EXPERTS), "--moe-router-topk", str(TOPK), "--moe-ffn-hidden-size", str(WIDTH)),
    *("--swiglu", "--disable-bias-linear", "--moe-grouped-gemm"),
    *("--moe-shared-expert-intermediate-size", str(WIDTH), "--expert-model-parallel-size", str(RANKS)),
)
ALL_TO_ALL = ("--moe-token-dispatcher-type", "alltoall")
ALL_GATHER = ("--moe-token-dispatcher-type", "allgather")
OVERLAP = (*ALL_TO_ALL, "--moe-alltoall-overlap-comm")
ALWAYS = (
    *OVERLAP,
    *("--moe-permutation-async-comm", "--moe-permute-fusion", "--gemm-gradient-accumulation-fusion"),
)
"""Every flag that a training has no reason to leave out."""
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
SIDES = {
    "alltoall": ALL_TO_ALL,
    "alltoall, layer recomputed": (*ALL_TO_ALL, *RECOMPUTED),
    "alltoall, together": (*ALL_TO_ALL, "--moe-permutation-async-comm"),
    "alltoall, overlapped": OVERLAP,
    "alltoall, overlapped and fused": ALWAYS,
    "alltoall, overlapped, layer recomputed": (*OVERLAP, *RECOMPUTED),
    "alltoall, overlapped, level0": (*OVERLAP, "--moe-zero-memory", "level0"),
    "alltoall, overlapped, level1": (*OVERLAP, "--moe-zero-memory", "level1"),
    "allgather": ALL_GATHER,
    "allgather, overlapped": (
        *ALL_GATHER,
        *("--moe-permutation-async-comm", "--moe-allgather-overlap-comm"),
    ),
}
REFERENCES = {name: name.partition(",")[0] for name in SIDES}


def trained(flags: Sequence[str], initial: Any = None) -> SideResult:
    """Train two steps and measure a third one."""
    return train_side(
        (*MODEL, *flags), RANKS, 2, initial=initial, gradients=False, measure=True, platform="cpu"
    )


def exchanged(side: SideResult) -> tuple[int, float]:
    """Return calls and bytes of all ranks in the group of experts."""
    totals = [
        total
        for rank in side.communication
        for (operation, group), total in rank.items()
        if "EXPERT" in group and operation != "all_reduce"
    ]
    return sum(total.calls for total in totals), sum(total.sent_bytes for total in totals)


_ROW, _NUMBER = 4 * HIDDEN, 4
_TOKENS = 256 * 2
"""Of a rank and micro-batch. Fixed routes send all rows of every other one to the other rank."""
_MASK = -(-EXPERTS // RANKS // 8)
"""Bytes of a row that say which experts of a rank it goes to."""
FORMULAS = {
    "alltoall, overlapped": (OVERLAP, _TOKENS // 2 * TOPK * 2 * (2 * _ROW + _NUMBER)),
    "alltoall, each row once": (
        (*ALL_TO_ALL, "--moe-zerc"),
        _TOKENS // 2 * (4 * _ROW + 2 * TOPK * _NUMBER + _MASK),
    ),
}
"""Flags, and bytes that a rank exchanges per layer and micro-batch with fixed routes."""


def byte_counts() -> dict[str, dict[str, float]]:
    """Return counted and expected bytes of exchanges of a step on both ranks."""
    found = {}
    for name, (flags, expected) in FORMULAS.items():
        side = trained((*flags, "--fix-router"))
        counted = sum(
            total.sent_bytes
            for rank in side.communication
            for (operation, _), total in rank.items()
            if operation == "all_to_all_single"
        )
        found[name] = {"counted": counted, "expected": float(expected * LAYERS * RANKS)}
    return found


PLACES = {
    (64, 8, 0.5): (1.11, 1.00),
    (64, 8, 1.0): (1.88, 1.69),
    (256, 32, 1.0): (5.37, 5.23),
    (256, 64, 0.5): (2.49, 2.09),
    (256, 64, 1.0): (10.57, 10.45),
}
"""Largest through mean load of ranks, by experts, ranks and exponent: planned places, and their bound."""
_COPIES = (1, 3, 8)


def balances() -> dict[str, dict[str, float]]:
    """Return how even ranks are loaded, by experts, ranks and exponent of Zipf's law."""
    found = {}
    for (experts, ranks, exponent), (greedy, bound) in PLACES.items():
        weights = [1 / (index + 1) ** exponent for index in range(experts)]
        loads = [round(weight / sum(weights) * experts * 10_000) for weight in weights]
        random.Random(1).shuffle(loads)
        mean = sum(loads) / ranks

        def largest(placement: Any, loads: Any = loads, mean: float = mean) -> float:
            return max(rank_loads(loads, placement)) / mean

        counts = [[load // ranks for load in loads] for _ in range(ranks)]
        of_copies = {
            f"copies {number}": max(rows_with_copies(counts, number)) * ranks / sum(map(sum, counts))
            for number in _COPIES
        }
        found[f"{experts}/{ranks} a={exponent}"] = {
            "contiguous": largest(contiguous_placement(experts, ranks)),
            "planned": largest(greedy_placement(loads, ranks)),
            "published plan": greedy,
            "bound": max(1.0, max(loads) / mean),
            "published bound": bound,
            **of_copies,
        }
    return found


_RECOMPUTED = "alltoall, overlapped, layer recomputed"
_PLAIN, _OVERLAPPED, _ALWAYS = "alltoall", "alltoall, overlapped", "alltoall, overlapped and fused"
_TIMED = (
    *(_PLAIN, _OVERLAPPED, _ALWAYS, _RECOMPUTED),
    *("alltoall, overlapped, level0", "alltoall, overlapped, level1"),
)
_TURNS, _STEPS = 3, 8


def step_seconds(turns: int, steps: int) -> dict[str, float]:
    """Return the shortest of the median step times of several turns, by side."""
    found = {name: float("inf") for name in _TIMED}
    for _ in range(turns):
        for name in _TIMED:
            side = train_side(
                (*MODEL, *SIDES[name]), RANKS, 1, gradients=False, timed_steps=steps, platform="cpu"
            )
            found[name] = min(found[name], side.measures["step_seconds"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Count and time, print a table, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    parser.add_argument("--turns", type=int, default=_TURNS, help="timed trainings of each side")
    parser.add_argument("--steps", type=int, default=_STEPS, help="timed steps of each training")
    options = parser.parse_args(argv)
    sides: dict[str, SideResult] = {}
    for name, flags in SIDES.items():
        first = next(iter(sides.values()), None)
        sides[name] = trained(flags, first.initial if first else None)
    rows = {}
    print(f"{'':<40}{'peak':>12}{'ratio':>8}{'calls':>8}{'bytes sent':>14}  losses")
    for name, side in sides.items():
        reference = sides[REFERENCES[name]]
        peak = side.measures["peak_bytes"]
        ratio = peak / reference.measures["peak_bytes"]
        calls, sent = exchanged(side)
        same = side.losses["lm loss"] == reference.losses["lm loss"]
        rows[name] = {"peak_bytes": peak, "ratio": ratio, "calls": calls, "sent": sent, "same_bits": same}
        bits = "the same bits" if same else "other bits"
        print(f"{name:<40}{peak:>12,.0f}{ratio:>8.3f}{calls:>8}{sent:>14,.0f}  {bits}")
    plain = rows["alltoall, overlapped"]["peak_bytes"]
    whole = plain - rows["alltoall, overlapped, layer recomputed"]["peak_bytes"]
    seconds = step_seconds(options.turns, options.steps)
    shares = {}
    for level in ("level0", "level1"):
        name = f"alltoall, overlapped, {level}"
        saved = plain - rows[name]["peak_bytes"]
        time = seconds[name] / seconds[_RECOMPUTED]
        shares[level] = {"saved_bytes": saved, "of_recomputing": saved / whole, "time_of_recomputing": time}
        print(
            f"{level} saves {saved:,.0f} bytes of the peak, {saved / whole:.0%} of what recomputing the "
            f"layer saves, in {time:.3f} of its step time"
        )
    slowdowns = {name: seconds[name] / seconds[_PLAIN] for name in (_OVERLAPPED, _ALWAYS)}
    for name, slowdown in slowdowns.items():
        print(f"{name}: steps take {slowdown:.3f} of the time of plain ones")
    bytes_found = byte_counts()
    for name, row in bytes_found.items():
        off = row["counted"] / row["expected"] - 1
        print(f"{name}, fixed routes: {row['counted']:,.0f} bytes exchanged, {off:.0%} off the formula")
    theirs, ours = run_world(moe_layer.both_orders, RANKS)[0]
    print("\n".join(moe_layer.table(theirs, ours)))
    clock = {
        str(ratio): {"megatron-core": theirs.waited(ratio), "overlapped": ours.waited(ratio)}
        for ratio in moe_layer.RATIOS
    }
    kept = {level: moe_kept.kept_bytes(level) / moe_kept.MIB for level in moe_kept.LEVELS}
    print("kept at DeepSeek-V3's shape, MiB: " + ", ".join(f"{name} {size:g}" for name, size in kept.items()))
    loads = balances()
    for name, row in loads.items():
        print(f"{name:<16}" + "  ".join(f"{what} {value:.2f}" for what, value in row.items()))
    if options.write:
        results = {
            "sides": rows,
            "levels": shares,
            "time_of_plain": slowdowns,
            "exchanged_bytes": bytes_found,
            "exposed": clock,
            "kept_mib": kept,
            "loads": loads,
        }
        print(f"written to {write('moe', results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
