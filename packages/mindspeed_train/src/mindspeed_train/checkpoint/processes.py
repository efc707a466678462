"""The identity of a process that writes a checkpoint: its machine, its id, its start."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path


def host_name() -> str:
    """Return the name of this machine, fit for a file name."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", socket.gethostname()) or "localhost"


def process_namespace() -> int:
    """Return a number that is the same for processes that see each other's ids, 0 where it is unknown.

    Containers may share the name of a machine.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_of(pid: int) -> int:
    """Return the start of a process in clock ticks since boot; 0 where it is unknown, -1 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return -1
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return -1
        except PermissionError:
            pass
        return 0
    fields = text.rpartition(")")[2].split()
    # A zombie has ended; only its parent has not noticed.
    return -1 if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class CoreTime:
    """Time of a process on the cores: nanoseconds on one and in the queue, and whether it wants one now."""

    is_ready: bool = False
    ran: int = 0
    queued: int = 0


def core_time_of(pid: int) -> CoreTime:
    """Return what a process has had of the cores; nothing where that is unknown."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        ran, queued = Path(f"/proc/{pid}/schedstat").read_text().split()[:2]
        return CoreTime(state == "R", int(ran), int(queued))
    except (OSError, IndexError, ValueError):
        return CoreTime()
