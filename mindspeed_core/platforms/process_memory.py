"""Memory of this process as the operating system counts it.

Resident set size is not what a device allocator reports: it includes the interpreter and libraries, and freed
memory may stay resident. That is why every figure carries its source, ``process RSS``.
"""

from __future__ import annotations

import os
import resource
import sys

SOURCE = "process RSS"


def resident_bytes() -> int:
    """Return the resident bytes from ``/proc/self/statm``; the peak so far where there is no ``/proc``."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return _peak_of_rusage()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """Return the most bytes resident since `reset_peak` (``VmHWM``), or since the process began."""
    try:
        with open("/proc/self/status", "rb") as file:
            status = file.read()
    except OSError:
        return _peak_of_rusage()
    # The kernel raises the high-water mark lazily: what is resident now may already be more.
    figures = [_kibibytes(status, name) for name in (b"VmHWM:", b"VmRSS:")]
    return max(figures) * 1024 or _peak_of_rusage()


def _kibibytes(status: bytes, name: bytes) -> int:
    start = status.find(name)
    return 0 if start < 0 else int(status[start + len(name) : status.index(b"kB", start)])


def reset_peak() -> bool:
    """Start a new peak by writing 5 to ``/proc/self/clear_refs``; False where that is not permitted."""
    try:
        with open("/proc/self/clear_refs", "wb") as file:
            file.write(b"5")
    except OSError:
        return False
    return True


def physical_bytes() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def attainable_bytes() -> int:
    """Return the bytes that this process may have: those of the machine, or fewer by ``ulimit -v``."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return physical_bytes() if limit == resource.RLIM_INFINITY else min(limit, physical_bytes())


def available_bytes() -> int:
    """Return the bytes available without swapping (``MemAvailable``); all of it where that is unknown."""
    try:
        with open("/proc/meminfo", "rb") as file:
            return _kibibytes(file.read(), b"MemAvailable:") * 1024 or physical_bytes()
    except OSError:
        return physical_bytes()


def _peak_of_rusage() -> int:
    """Return the peak where there is no ``/proc``; on Linux this figure would begin with the parent's."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
