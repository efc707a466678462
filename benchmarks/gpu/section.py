"""The process of one section: ``python section.py NAME FILE --seconds N [--smoke]``; `run.py` starts it."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from machine import machine
from report import Report
from sections import SECTIONS

_OPTIONAL = ("triton", "numpy", "transformer-engine", "flash-attn", "liger-kernel", "megablocks", "apex")


def versions() -> dict[str, str]:
    """Return the versions of optional packages, ``absent`` where one is not installed."""
    found = {}
    for name in _OPTIONAL:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def devices() -> list[dict[str, Any]]:
    """Return name, memory and compute capability of every GPU that is visible."""
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": about.name,
                "memory_gib": round(about.total_memory / 2**30, 1),
                "multiprocessors": about.multi_processor_count,
                "compute_capability": f"{about.major}.{about.minor}",
            }
        )
    return found


def main() -> None:
    """Run one section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=[section.name for section in SECTIONS])
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--slice", default="1/1")
    parser.add_argument("--feature", action="append", default=[])
    options = parser.parse_args()
    # Some seconds are kept for ending in order before the process is killed.
    report = Report(options.path, options.smoke, time.monotonic() + 0.9 * options.seconds)
    number, count = map(int, options.slice.split("/"))
    report.slice, report.features = (number, count), tuple(options.feature)
    report.facts = {
        "section": options.name,
        "smoke": options.smoke,
        "command": f"python benchmarks/gpu/run.py --section {options.name}" + " --smoke" * options.smoke,
        "machine": machine(),
        "gpus": [] if options.smoke else devices(),
        "cuda": torch.version.cuda,
        "versions": versions(),
    }
    report.write()
    chosen = next(section for section in SECTIONS if section.name == options.name)
    import_module(chosen.module).measure(report)
    report.write()
    sys.exit(any(row["passed"] is False for row in report.rows))


if __name__ == "__main__":
    main()
