"""Facts of the node that a process runs on."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor_name() -> str:
    """Return the model of the CPU as Linux names it; otherwise the machine type (``arm64``)."""
    found = first_match(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return found or platform.processor() or platform.machine()


def first_match(file: Path, pattern: str) -> str:
    """Return the first group of a pattern's first match in a text file; empty without file or match."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else ""
