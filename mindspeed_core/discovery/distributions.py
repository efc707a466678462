"""Installed distributions, found in the folders of the module path.

`importlib.metadata` gives the same answers and imports parsers of e-mail, sockets and archives for them, a
tenth of the time of ``mindspeed-features list``. It is asked wherever distributions may lie elsewhere: in
archives, in eggs, or behind an importer of somebody's own.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.machinery import PathFinder

Reader = Callable[[str], str | None]
"""Reads one file of a distribution's metadata; None where it has none of this name."""
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)


def normalized(name: str) -> str:
    """Return the name of a distribution as installers compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_distributions() -> Iterator[tuple[str, Reader]]:
    """Yield the normalized name of each distribution, and what reads its metadata.

    One that is on the path twice (an editable checkout beside an installed wheel) is represented by the copy
    that comes first, which is the one Python imports.
    """
    folders = _folders()
    seen = set()
    for name, read in _of_importlib() if folders is None else folders:
        if name not in seen:
            seen.add(name)
            yield name, read


def headers(read: Reader) -> dict[str, str]:
    """Return the fields above the description in a distribution's metadata, the first of each name.

    Raises:
        Exception: the file cannot be read.
    """
    fields: dict[str, str] = {}
    above, _, _ = (read("METADATA") or read("PKG-INFO") or read("") or "").partition("\n\n")
    for line in above.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name, value.strip())
    return fields


def entries(read: Reader) -> Iterator[tuple[str, str, str]]:
    """Yield group, name and value of each entry point of a distribution.

    Raises:
        ValueError: a line is none.
    """
    group = ""
    for line in map(str.strip, (read("entry_points.txt") or "").splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line.strip("[]")
        elif group and line and not line.startswith("#"):
            name, value = map(str.strip, line.split("=", 1))
            yield group, name, value


def _folders() -> list[tuple[str, Reader]] | None:
    """Find distributions in the folders of the module path; None where some may lie elsewhere."""
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return None
    found: list[tuple[str, Reader]] = []
    for place in sys.path:
        folder = place or "."
        if place.lower().endswith(".egg"):
            return None
        try:
            changed = os.stat(folder).st_mtime_ns
            found += _listed(folder if place else os.getcwd(), changed)
        except NotADirectoryError:
            return None
        except OSError:
            continue
    return found


@lru_cache(maxsize=256)
def _listed(folder: str, changed: int) -> tuple[tuple[str, Reader], ...]:
    """List the distributions of a folder, anew when it ``changed``, as importlib.metadata does."""
    found = []
    for name in os.listdir(folder):
        stem, ending = os.path.splitext(name)
        if ending.lower() in (".dist-info", ".egg-info"):
            found.append((normalized(stem.partition("-")[0]), partial(_text, os.path.join(folder, name))))
    return tuple(found)


def _text(folder: str, name: str) -> str | None:
    try:
        with open(os.path.join(folder, name) if name else folder, encoding="utf-8") as file:
            return file.read()
    except _ABSENT:
        return None


def _of_importlib() -> Iterator[tuple[str, Reader]]:
    from importlib.metadata import distributions

    for distribution in distributions():
        try:
            name = normalized(str(distribution.metadata["Name"]))
        except Exception:
            name = f"unreadable distribution {id(distribution)}"
        yield name, distribution.read_text
