"""Symbols that shared libraries need and offer, as binutils and the loader report them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from mindspeed_core.errors import UserError

_WEAK = frozenset("wWvV")


def parse_symbols(listing: str) -> tuple[frozenset[str], frozenset[str]]:
    """Read what ``nm --dynamic --portability`` prints.

    Args:
        listing: lines ``NAME TYPE [VALUE SIZE]``; a name may carry a version (``memcpy@GLIBC_2.14``).

    Returns:
        The names that must be found elsewhere, and the names that are offered. A weak name that is not
        defined is neither: the loader goes on without it.
    """
    wanted: set[str] = set()
    offered: set[str] = set()
    for line in listing.splitlines():
        parts = line.split()
        if len(parts) < 2 or len(parts[1]) != 1:
            continue
        name = parts[0].partition("@")[0]
        if parts[1] == "U":
            wanted.add(name)
        elif parts[1] not in _WEAK or len(parts) > 2:
            offered.add(name)
    return frozenset(wanted), frozenset(offered)


def symbols(library: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a library wants and offers; see `parse_symbols`."""
    return parse_symbols(run_tool("nm", "--dynamic", "--portability", str(library)))


def needed(library: Path) -> tuple[str, ...]:
    """Return the sonames that a library asks the loader for."""
    return tuple(re.findall(r"\(NEEDED\).*?\[(.+?)\]", run_tool("readelf", "--dynamic", str(library))))


def found_by_loader(libraries: Sequence[Path]) -> dict[str, Path | None]:
    """Find each soname that libraries need, directly or not, as the loader does; None where absent."""
    found: dict[str, Path | None] = {}
    for library in libraries:
        found.update(parse_loader(run_tool("ldd", str(library))))
    return found


def parse_loader(listing: str) -> dict[str, Path | None]:
    """Read what ``ldd`` prints: ``NAME => PATH (ADDRESS)``, ``NAME => not found``, or the loader."""
    found: dict[str, Path | None] = {}
    for line in listing.splitlines():
        soname, arrow, place = line.strip().partition(" => ")
        path = (place if arrow else soname).partition(" (")[0]
        if "not found" in place:
            found[soname] = None
        elif path.startswith("/"):
            found[soname if arrow else Path(path).name] = Path(path)
    return found


def without_own(names: Iterable[str]) -> list[str]:
    """Leave out what this process offers itself: the interpreter and the C library."""
    process = ctypes.CDLL(None)
    return sorted(name for name in names if not hasattr(process, name))


def run_tool(*command: str) -> str:
    """Run a program of the compiler's family and return what it prints.

    Raises:
        UserError: it is not installed, or fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(
            f"{command[0]} is not installed; the stand-in libraries are made with gcc and binutils "
            "(apt-get install gcc binutils, or your system's packages of these names)"
        ) from error
    if done.returncode:
        raise UserError(f"{' '.join(command[:2])} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
