"""Measure what mindspeed-memory saves and costs, beside the same training without it in the same run.

a  bytes of a small model on the CPU: every feature, and combinations, beside closed formulas
b  published models, one rank of each in shapes alone, beside formulas and published shares of memory
c  bytes and time of main parameters that are kept as the weight and 16 further bits
d  measured plans of recomputation against full recomputation within the same budgets
e  what swapping copies: order, buffers, bytes of a layer, and the bandwidth that they need
f  what torch's allocator would reserve, by a model of it, with fixed segments, growing ones and two pools

Results of all parts are one file, ``results/memory.json``; ``--write`` renews the parts that were run, and
``--show`` prints the tables of the file without running anything. Bytes are the same on every machine; times
of c and d are this one's: run them while nothing else does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import memory_activations as activations
import memory_allocator as allocator
import memory_optimizer as optimizer
import memory_policies as policies
from machine import RESULTS, update

_NAME, _PARTS = "memory", "abcdef"


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part."""
    parts: Mapping[str, Callable[[], dict[str, Any]]] = {
        "a": lambda: {"activations": activations.activation_bytes(), "optimizer": optimizer.kept_bytes()},
        "b": lambda: optimizer.published(options.models),
        "c": optimizer.split_masters,
        "d": lambda: policies.policies(options.rounds, options.tokens),
        "e": activations.swapped_bytes,
        "f": allocator.reserved_bytes,
    }
    return parts[part]()


def show(part: str, found: dict[str, Any]) -> None:
    """Print the tables of one part."""
    print(f"\n({part})")
    if part == "a":
        activations.show_activation_bytes(found["activations"])
        optimizer.show_kept_bytes(found["optimizer"])
    elif part == "b":
        optimizer.show_published(found)
    elif part == "c":
        optimizer.show_split_masters(found)
    elif part == "d":
        policies.show_on_cpu(found["cpu"])
        policies.show_simulated(found["models"])
    elif part == "e":
        activations.show_swapped_bytes(found)
    else:
        allocator.show_reserved_bytes(found)


def missed(results: Mapping[str, Any]) -> list[str]:
    """Return the goals that these results miss, one line each."""
    found: list[str] = []
    if "a" in results:
        found += activations.missed_bytes(results["a"]["activations"])
        found += [
            f"{name}: other bits" for name, row in results["a"]["optimizer"].items() if not row["same_bits"]
        ]
    if "b" in results:
        found += optimizer.missed_formulas(results["b"])
    if "c" in results:
        found += optimizer.missed_split(results["c"])
    if "d" in results:
        sides = results["d"]["cpu"]["sides"]
        found += [f"plan of {name}: over its budget" for name, row in sides.items() if not row["held"]]
    if "e" in results:
        found += activations.missed_copies(results["e"])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print tables and missed goals, and write the numbers where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=_PARTS, help="parts to run, all of a to f by default")
    parser.add_argument("--write", action="store_true", help="keep the numbers in benchmarks/results")
    parser.add_argument(
        "--show", action="store_true", help="print the numbers that are kept there, and run nothing"
    )
    parser.add_argument("--models", nargs="+", choices=list(optimizer.MODELS), default=list(optimizer.MODELS))
    parser.add_argument("--rounds", type=int, default=10, help="steps of each side of d on the CPU")
    parser.add_argument("--tokens", type=int, default=1024, help="sequence in which d measures a layer")
    options = parser.parse_args(argv)
    wrong = set(options.parts) - set(_PARTS)
    if wrong:
        parser.error(f"--parts {options.parts}: {min(wrong)} is no part; there are a to f")
    results: dict[str, Any] = {}
    if options.show:
        path = RESULTS / f"{_NAME}.json"
        if not path.exists():
            parser.error(f"--show: there is no {path.name} yet; run with --write first")
        kept = json.loads(path.read_text(encoding="utf-8"))
        results = {part: kept[part] for part in sorted(options.parts) if part in kept}
        print(", ".join(f"{name} {value}" for name, value in kept["machine"].items()))
    for part in sorted(set(options.parts)):
        if not options.show:
            results[part] = measure(part, options)
        if part in results:
            show(part, results[part])
    for line in missed(results):
        print(f"MISSED: {line}")
    if options.write and not options.show:
        print(f"written to {update(_NAME, results).name}")
    return 1 if missed(results) else 0


if __name__ == "__main__":
    sys.exit(main())
