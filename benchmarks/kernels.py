"""Time the fused operators against what megatron-core does without them, both sides in turns.

One thread, CPU seconds, the best of several rounds; peak memory is the growth of the process. Each row
states the bound it is held to. Beside it stands how near our side comes to what the machine does at best:
the bytes or products it cannot do without, and the operations that it is made of, each against the measured
rate of copies in the cache or of products. Where a CUDA device is there, the same is measured on it, against
other packages as far as they are installed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from kernel_cases import FAMILIES, Case
from kernel_cuda_cases import CUDA_FAMILIES, absent, seconds_on_device
from machine import RESULTS, write
from roofline import Best, Spent, measured_best, seconds, taken_apart

from mindspeed_core.platforms import process_memory


@dataclass(frozen=True)
class Row:
    """One measured case; seconds are the best of all rounds, bytes the growth of the process at its peak.

    Attributes:
        share_of_peak: bytes or products that cannot be left out, per second, as a part of the machine's best.
        share_of_operations: the same for the operations that were run, each with what it moves and computes.
        operations: those that took longest.
    """

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
    share_of_operations: float | None
    operations: dict[str, Spent]
    met: bool


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


def near_the_limit(spent: dict[str, Spent], best: Best, dtype: str) -> float:
    """Seconds that the operations would take at the machine's best, as a part of what they took."""
    ideal = sum(max(item.bytes / best.cache, item.flop / best.flop[dtype]) for item in spent.values())
    return ideal / sum(item.seconds for item in spent.values())


def measure(case: Case, rounds: float, best: Best) -> Row:
    """Take turns, then measure memory once, then take our side apart."""
    for side in (case.ours, case.theirs):
        side()
    ours, theirs = [], []
    for _ in range(max(2, round(rounds * case.rounds))):
        theirs.append(seconds(case.theirs) / case.repeats)
        ours.append(seconds(case.ours) / case.repeats)
    mine, other = min(ours), min(theirs)
    our_bytes, their_bytes = (growth(side) for side in (case.ours, case.theirs)) if case.memory else (0, 0)
    ratio = our_bytes / their_bytes if their_bytes else None
    peak = best.memory if case.limit == "bytes" else best.flop[case.dtype]
    share = case.work / mine / peak if case.work else None
    spent = {} if case.opaque else taken_apart(case.ours)
    # Of a row that counts products, these say more than its operations, some of which are opaque.
    near = (
        near_the_limit(spent, best, case.dtype)
        if spent and not (case.work and case.limit == "flop")
        else None
    )
    speedup = other / mine
    met = (case.at_least is None or speedup >= case.at_least) and (
        case.at_most is None or ratio is None or ratio <= case.at_most
    )
    longest = dict(list(spent.items())[:6])
    return Row(
        *(case.name, mine, other, speedup, case.at_least),
        *(our_bytes, their_bytes, ratio, case.at_most, share, case.limit if share else ""),
        *(near, longest, met),
    )


def show(row: Row) -> None:
    """One line of the table, and the operations of a row that misses its bound."""
    bound = "" if row.at_least is None else f" (>= {row.at_least:g})"
    memory = ""
    if row.memory_ratio is not None:
        limit = "" if row.at_most is None else f" (<= {row.at_most:.3f})"
        sides = f"{row.ours_bytes / 2**20:6.0f}/{row.theirs_bytes / 2**20:6.0f} MiB"
        memory = f"  {sides} {row.memory_ratio:.3f}{limit}"
    share = "" if row.share_of_peak is None else f"  {row.share_of_peak:.0%} of peak {row.limit}"
    near = "" if row.share_of_operations is None else f"  operations at {row.share_of_operations:.0%}"
    mark = "ok  " if row.met else "MISS"
    milliseconds = f"{row.ours_seconds * 1e3:9.3f} / {row.theirs_seconds * 1e3:9.3f} ms"
    print(f"{mark} {row.name:44} {milliseconds}  {row.speedup:5.2f}x{bound}{memory}{share}{near}", flush=True)
    for name, spent in ({} if row.met else row.operations).items():
        rate = (
            f"{spent.bytes / spent.seconds / 1e9:6.1f} GB/s {spent.flop / spent.seconds / 1e9:7.1f} GFLOP/s"
        )
        print(f"       {spent.times:4} x {name:28} {spent.seconds * 1e3:8.3f} ms  {rate}")


def table(rows: Sequence[Row], best: Best) -> str:
    """All rows as Markdown."""
    products = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in best.flop.items())
    copies = (
        f"{best.memory / 1e9:.1f} GB/s copied from memory, {best.cache / 1e9:.1f} GB/s inside of the cache"
    )
    lines = [
        "# What the fused operators cost on CPU",
        "",
        "One thread, CPU time, both sides in turns; written by `kernels.py`. The machine's best: "
        f"{products}, {copies}. *Peak* is the part of it that those bytes or products reach which cannot be "
        "left out; *operations* the part that the operations reach which were run, each with what it reads, "
        "writes and computes.",
        "",
        "| case | ours, ms | theirs, ms | times as fast | bound | memory | bound | peak | operations |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (
            row.name,
            f"{row.ours_seconds * 1e3:.3f}",
            f"{row.theirs_seconds * 1e3:.3f}",
            f"{row.speedup:.2f}",
            "" if row.at_least is None else f"{row.at_least:g}" + ("" if row.met else " missed"),
            "" if row.memory_ratio is None else f"{row.memory_ratio:.3f}",
            "" if row.at_most is None else f"{row.at_most:.3f}",
            "" if row.share_of_peak is None else f"{row.share_of_peak:.0%} of {row.limit}",
            "" if row.share_of_operations is None else f"{row.share_of_operations:.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def on_cuda(rounds: float) -> dict[str, Any]:
    """The rows of the CUDA device, and what cannot be compared; only the latter without a device."""
    missing = absent()
    for name, reason in missing.items():
        print(f"absent: {name}: {reason}")
    found: dict[str, Any] = {"absent": missing}
    if not torch.cuda.is_available():
        return found
    found["device"] = torch.cuda.get_device_name()
    for family, cases in CUDA_FAMILIES.items():
        found[family] = []
        for case in cases():
            ours, theirs = [], []
            for _ in range(max(4, round(rounds * 20))):
                theirs.append(seconds_on_device(case.theirs))
                ours.append(seconds_on_device(case.ours))
            row = {"name": case.name, "ours_seconds": min(ours), "theirs_seconds": min(theirs)}
            print(f"{case.name:60} {min(ours) * 1e3:8.3f} / {min(theirs) * 1e3:8.3f} ms", flush=True)
            found[family].append(row)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the families named, all by default, and write their numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}, cuda")
    parser.add_argument("--rounds", type=float, default=1.0, help="times the rounds of every case")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    best = measured_best()
    products = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {name}" for name, rate in best.flop.items())
    print(f"peak: {products}, {best.memory / 1e9:.1f} GB/s copied, {best.cache / 1e9:.1f} GB/s in the cache")
    results: dict[str, Any] = {"peaks": asdict(best)}
    rows: list[Row] = []
    for family in options.families or (*FAMILIES, "cuda"):
        if family == "cuda":
            results[family] = on_cuda(options.rounds)
            continue
        first = len(rows)
        for case in FAMILIES[family]():
            rows.append(measure(case, options.rounds, best))
            show(rows[-1])
        results[family] = [asdict(row) for row in rows[first:]]
    if not options.no_write and not options.families:
        print(f"written to {write('kernels', results).name}")
        (RESULTS / "kernels.md").write_text(table(rows, best), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
