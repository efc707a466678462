"""Count what layers of experts send and keep, with and without the features of mindspeed-moe.

Two processes train the same small GPT from the same weights. Bytes and calls are the same on every machine;
peak bytes are those of tensors alive during forward and backward of a step. Step times are this machine's;
the sides take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from machine import write

from mindspeed_core.testing.training import SideResult, train_side

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
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
SIDES = {
    "alltoall": ALL_TO_ALL,
    "alltoall, layer recomputed": (*ALL_TO_ALL, *RECOMPUTED),
    "alltoall, together": (*ALL_TO_ALL, "--moe-permutation-async-comm"),
    "alltoall, overlapped": OVERLAP,
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


_RECOMPUTED = "alltoall, overlapped, layer recomputed"
_TIMED = (_RECOMPUTED, "alltoall, overlapped, level0", "alltoall, overlapped, level1")
_TURNS, _STEPS = 3, 8


def step_seconds() -> dict[str, float]:
    """Return the shortest of the median step times of several turns, by side."""
    found = {name: float("inf") for name in _TIMED}
    for _ in range(_TURNS):
        for name in _TIMED:
            side = train_side(
                (*MODEL, *SIDES[name]), RANKS, 1, gradients=False, timed_steps=_STEPS, platform="cpu"
            )
            found[name] = min(found[name], side.measures["step_seconds"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Count and time, print a table, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    options = parser.parse_args(argv)
    sides: dict[str, SideResult] = {}
    for name, flags in SIDES.items():
        first = next(iter(sides.values()), None)
        sides[name] = trained(flags, first.initial if first else None)
    rows = {}
    print(f"{'':<32}{'peak':>12}{'ratio':>8}{'calls':>8}{'bytes sent':>14}  losses")
    for name, side in sides.items():
        reference = sides[REFERENCES[name]]
        peak = side.measures["peak_bytes"]
        ratio = peak / reference.measures["peak_bytes"]
        calls, sent = exchanged(side)
        same = side.losses["lm loss"] == reference.losses["lm loss"]
        rows[name] = {"peak_bytes": peak, "ratio": ratio, "calls": calls, "sent": sent, "same_bits": same}
        bits = "the same bits" if same else "other bits"
        print(f"{name:<32}{peak:>12,.0f}{ratio:>8.3f}{calls:>8}{sent:>14,.0f}  {bits}")
    plain = rows["alltoall, overlapped"]["peak_bytes"]
    whole = plain - rows["alltoall, overlapped, layer recomputed"]["peak_bytes"]
    seconds = step_seconds()
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
    if options.write:
        print(f"written to {write('moe', {'sides': rows, 'levels': shares}).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
