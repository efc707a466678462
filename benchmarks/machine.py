"""Name the machine of a benchmark, and write its JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mindspeed_core.platforms.machine import processor_name

RESULTS = Path(__file__).resolve().parent / "results"
_LOOKED = 3.0
"""Seconds over which processors are watched."""


def machine() -> dict[str, Any]:
    """Processor, cores, memory and the versions that matter."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "mindspeed-core")},
    }


def write(name: str, results: Mapping[str, Any]) -> Path:
    """Write a benchmark's results beside the machine they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n", encoding="utf-8")
    return path


def update(name: str, parts: Mapping[str, Any]) -> Path:
    """Write parts of a benchmark's results, and keep the others that the same machine measured.

    Args:
        name: of the file.
        parts: results by part.
    """
    path = RESULTS / f"{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = before if before.pop("machine", None) == machine() else {}
    return write(name, dict(sorted({**kept, **parts}.items())))


def busy_processors() -> float:
    """Return how many processors others keep busy now; where the system does not say, by the last minute."""
    found = Path("/proc/stat")
    if not found.exists():
        return os.getloadavg()[0]

    def used() -> tuple[float, float]:
        ticks = [float(word) for word in found.read_text().splitlines()[0].split()[1:9]]
        return sum(ticks) - ticks[3] - ticks[4], sum(ticks)

    before = used()
    time.sleep(_LOOKED)
    busy, all_of_them = (after - early for after, early in zip(used(), before))
    return busy / max(1.0, all_of_them) * (os.cpu_count() or 1)
