"""Files of an earlier run, which a later one with the same names moves aside and never overwrites."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


def next_number(folder: Path, names: Iterable[str]) -> int:
    """Return the number under which none of these names is taken yet: ``name.N.suffix``."""
    numbered = [_numbered(name) for name in names]
    existing = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    taken = [int(match[1]) for name in existing for form in numbered if (match := form.fullmatch(name))]
    return max(taken, default=0) + 1


def move_aside(folder: Path, names: Iterable[str], number: int | None = None) -> list[Path]:
    """Rename the files of these names that are there, all with the same number.

    Args:
        folder: may be missing.
        names: of files in it.
        number: the next free one by default.

    Returns:
        Where they are now.

    Raises:
        OSError: a file cannot be renamed.
    """
    names = list(names)
    if number is None:
        number = next_number(folder, names)
    moved = []
    for path in (folder / name for name in names):
        if path.exists() or path.is_symlink():
            moved.append(path.rename(path.with_name(f"{path.stem}.{number}{path.suffix}")))
    return moved


def _numbered(name: str) -> re.Pattern[str]:
    path = Path(name)
    return re.compile(rf"{re.escape(path.stem)}\.(\d+){re.escape(path.suffix)}")
