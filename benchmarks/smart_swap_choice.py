"""Time smart swap's choice from a trace of many storages: ``python benchmarks/smart_swap_choice.py``.

CPU seconds of one process, the best of some rounds; every rank chooses once, between two steps. The time
grows with the storages of a pass times those of a step.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence

from machine import write

from mindspeed_memory.policy.tensor_swaps import Life, Trace, chosen_swaps

SIZES = ((240, 8), (400, 16))
"""Storages of a pass, and micro-batches of a step."""
_MIB = 2**20
_SECONDS, _BANDWIDTH = 1e-3, 20e9


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the seconds of each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--print-only", action="store_true", help="do not write benchmarks/results")
    options = parser.parse_args(arguments)
    found = {}
    for places, microbatches in SIZES:
        trace, best = trace_of(places, microbatches), float("inf")
        for _ in range(options.rounds):
            before = time.process_time()
            swaps = chosen_swaps(trace, bandwidth=_BANDWIDTH)
            best = min(best, time.process_time() - before)
        name = f"{places} storages, {microbatches} micro-batches"
        found[name] = {
            "seconds": round(best, 3),
            "chosen": len(swaps.places),
            "peak_mib": round(swaps.peak / _MIB, 1),
            "peak_mib_without": round(swaps.plain_peak / _MIB, 1),
        }
        print(f"{name}: {best:.3f} s, {len(swaps.places)} chosen")
    if not options.print_only:
        write("smart_swap_choice", found)
    return 0


def trace_of(places: int, microbatches: int) -> Trace:
    """Return a step whose micro-batches follow one another, with storages of 1 to 64 MiB."""
    source = random.Random(0)
    sizes = [source.randint(1, 64) * _MIB for _ in range(places)]
    lives, changes, start = [], [], 0.0
    for _ in range(microbatches):
        for place, nbytes in enumerate(sizes):
            saved, needed = start + place * _SECONDS, start + (3 * places - 2 * place) * _SECONDS
            lives.append(Life((0, place), nbytes, saved, needed))
            changes += [(saved, nbytes), (needed, -nbytes)]
        start += 3 * places * _SECONDS
    alive, now = [], 0
    for moment, change in sorted(changes):
        alive.append((moment, now + max(change, 0)))
        now += change
    return Trace(tuple(lives), tuple(alive))


if __name__ == "__main__":
    sys.exit(main())
