"""Facts of the node that a process runs on, and of its place in a launch. Torch-free."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path


def processor_name() -> str:
    """Return the model of the CPU as Linux names it; otherwise the machine type (``arm64``)."""
    from pathlib import Path

    model = first_match(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return model or platform.processor() or platform.machine()


def first_match(file: Path, pattern: str) -> str:
    """Return the first group of a pattern's first match in a text file; empty without file or match."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def numbered_variable(name: str, default: int | None, environment: Mapping[str, str] | None = None) -> int:
    """Return the number in a variable of the launcher; ``default`` where it is unset.

    Raises:
        UserError: it is no number, or it is unset and there is no default.
    """
    text = (os.environ if environment is None else environment).get(name, "")
    if not text and default is not None:
        return default
    if not text:
        raise UserError(unset_variable(name))
    if not text.strip().isdecimal():
        raise UserError(
            f"{name} {text!r} in the environment is no number; unset it, or start the job with torchrun, "
            "which sets it"
        )
    return int(text)


def unset_variable(name: str) -> str:
    """Return the message about a launcher's variable that is not set."""
    return (
        f"{name} is not set, but this process is one of several; set MASTER_ADDR, MASTER_PORT, RANK and "
        "WORLD_SIZE for each, or start the job with torchrun, which does"
    )
