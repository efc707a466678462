"""Memory that the allocator keeps for later, given back to the operating system.

glibc keeps blocks of up to 32 MiB that were freed. Chunks of many sizes leave gaps between them that no later
chunk fits into, so that work on a deep model would hold more than work on a shallow one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Give free pages back, where the C library can."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return found
