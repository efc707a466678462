"""What the fused operators cost against what megatron-core does without them, both sides in turns.

One thread, processor seconds, the best of several rounds; peak memory is the growth of the process. Each row
states the bound it is held to. Where a row misses its bound, the share of the machine's measured peak (of
products or of copies) that our side reaches says how much is left to gain.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from kernel_cases import FAMILIES, Case
from machine import write

from mindspeed_core.platforms import process_memory


@dataclass(frozen=True)
class Row:
    """One measured case; seconds are the best of all rounds, bytes the growth of the process at its peak."""

    name: str
    ours_seconds: float
    theirs_seconds: float
    speedup: float
    at_least: float | None
    ours_bytes: int
    theirs_bytes: int
    memory_ratio: float | None
    at_most: float | None
    share_of_peak: float | None
    limit: str
    met: bool


def seconds(function: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def growth(function: Callable[[], object]) -> int:
    """Bytes by which the process grows at the peak of one call."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    process_memory.reset_peak()
    before = process_memory.resident_bytes()
    function()
    return max(0, process_memory.peak_resident_bytes() - before)


def peaks() -> dict[str, float]:
    """What this machine does at best on one thread: products per second, and bytes copied per second."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    product = min(seconds(lambda: a @ b) for _ in range(8))
    large = torch.randn(1 << 25)
    target = torch.empty_like(large)
    copy = min(seconds(lambda: target.copy_(large)) for _ in range(8))
    return {"flop": 2 * 1024**3 / product, "bytes": 2 * large.nbytes / copy}


def measure(case: Case, rounds: float, best: dict[str, float]) -> Row:
    """Take turns, then measure memory once."""
    for side in (case.ours, case.theirs):
        side()
    ours, theirs = [], []
    for _ in range(max(2, round(rounds * case.rounds))):
        theirs.append(seconds(case.theirs) / case.repeats)
        ours.append(seconds(case.ours) / case.repeats)
    mine, other = min(ours), min(theirs)
    our_bytes, their_bytes = (growth(side) for side in (case.ours, case.theirs)) if case.memory else (0, 0)
    ratio = our_bytes / their_bytes if their_bytes else None
    share = case.work / mine / best[case.limit] if case.work else None
    speedup = other / mine
    met = (case.at_least is None or speedup >= case.at_least) and (
        case.at_most is None or ratio is None or ratio <= case.at_most
    )
    return Row(
        *(case.name, mine, other, speedup, case.at_least),
        *(our_bytes, their_bytes, ratio, case.at_most, share, case.limit if share else "", met),
    )


def show(row: Row) -> None:
    """One line of the table."""
    bound = "" if row.at_least is None else f" (>= {row.at_least:g})"
    memory = ""
    if row.memory_ratio is not None:
        limit = "" if row.at_most is None else f" (<= {row.at_most:.3f})"
        sides = f"{row.ours_bytes / 2**20:6.0f}/{row.theirs_bytes / 2**20:6.0f} MiB"
        memory = f"  {sides} {row.memory_ratio:.3f}{limit}"
    share = "" if row.share_of_peak is None else f"  {row.share_of_peak:.0%} of peak {row.limit}"
    mark = "ok  " if row.met else "MISS"
    milliseconds = f"{row.ours_seconds * 1e3:9.3f} / {row.theirs_seconds * 1e3:9.3f} ms"
    print(f"{mark} {row.name:44} {milliseconds}  {row.speedup:5.2f}x{bound}{memory}{share}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the families named, all by default, and write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--rounds", type=float, default=1.0, help="times the rounds of every case")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    best = peaks()
    print(f"peak: {best['flop'] / 1e9:.0f} GFLOP/s, {best['bytes'] / 1e9:.1f} GB/s copied")
    results: dict[str, Any] = {"peaks": best}
    for family in options.families or FAMILIES:
        rows = []
        for case in FAMILIES[family]():
            rows.append(measure(case, options.rounds, best))
            show(rows[-1])
        results[family] = [asdict(row) for row in rows]
    if not options.no_write and not options.families:
        print(f"written to {write('kernels', results).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
