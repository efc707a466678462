"""Context parallelism measured: what is sent, kept and computed, how precise it is, and how long it takes.

Counts are exact and the same everywhere; only ``wall_time`` depends on the machine. Every part states the
bound it is held to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import context_parallel_counts as counts
from context_parallel_precision import precision
from context_parallel_time import wall_time
from machine import write

PARTS: dict[str, Callable[[], Any]] = {
    "sent_bytes": counts.sent_bytes,
    "order": counts.order,
    "memory": counts.memory,
    "balance": counts.balance,
    "packed_share": counts.packed_share,
    "precision": precision,
    "wall_time": wall_time,
}


def verdicts(results: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Compare the counts with their bounds, in one sentence each."""
    found: dict[str, tuple[str, bool]] = {}
    if "sent_bytes" in results:
        exact = sum(row["exact"] for row in results["sent_bytes"])
        total = len(results["sent_bytes"])
        found["sent_bytes"] = (
            f"{exact} of {total} cases send what the formula says, to the byte",
            exact == total,
        )
    if "order" in results:
        early = results["order"]["posted_before_computed"]
        found["order"] = ("the next keys are posted before those at hand are computed with", early)
    if "memory" in results:
        # Where there are more ranks than key heads, Ulysses keeps each more than once but with its cache.
        ratios = [
            row["kept_ratio"]
            for row in results["memory"]
            if row["kept_ratio"] and (row["algorithm"], row["ranks"]) != ("Ulysses", 16)
        ]
        peaks = [
            row["peak_ratio"] for row in results["memory"] if row["peak_ratio"] and row["algorithm"] == "ring"
        ]
        met = all(1.96 <= ratio <= 2.04 for ratio in ratios) and min(peaks) >= 1.9
        text = f"twice the ranks keep 1/{min(ratios):.3f} of the bytes, a ring's peak is 1/{min(peaks):.3f}"
        found["memory"] = (text, met)
    if "balance" in results:
        worst = max(row["balanced_worst"] for row in results["balance"])
        causal = next(row["balanced"] for row in results["balance"] if row["mask"] == "causal")
        text = f"causal work is {causal:.4f} of the mean, {worst:.3f} at worst under any mask"
        found["balance"] = (text, causal <= 1.0001 and worst <= 1.05)
    if "packed_share" in results:
        row = results["packed_share"][0]
        text = (
            f"packed documents fetch {row['share']:.0%} of a ring's keys at {row['balance']:.3f} of mean work"
        )
        found["packed_share"] = (text, row["share"] <= 0.45 and row["balance_worst"] <= 1.05)
    if "precision" in results:
        last = results["precision"][-1]
        off = last["travelling_float32_to_2_ranks"]
        text = f"gradients of keys at {last['ranks']} ranks are {off:.2f} times as far off as at 2"
        found["precision"] = (text, off <= 1.1)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the parts named, all by default, and write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(argv)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    results: dict[str, Any] = {}
    for name in options.parts or PARTS:
        results[name] = PARTS[name]()
        for row in results[name] if isinstance(results[name], list) else results[name].items():
            print(name, row, flush=True)
    found = verdicts(results)
    for text, met in found.values():
        print(f"{'ok  ' if met else 'MISS'} {text}", flush=True)
    if not options.no_write and not options.parts:
        summary = {name: {"says": text, "met": met} for name, (text, met) in found.items()}
        print(f"written to {write('context_parallel', {'summary': summary, **results}).name}")
    return 0 if all(met for _, met in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
