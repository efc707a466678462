"""Places in the code that led to what an instrument sees: kept cheaply, written as of installed packages."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from types import CodeType


class CodePlace(NamedTuple):
    """A line of a function that was running."""

    code: CodeType
    line: int

    @property
    def file(self) -> str:
        """Return the file as of its installed package: ``megatron/core/optimizer/clip_grads.py``."""
        return _below(self.code.co_filename, tuple(sys.path))

    @property
    def function(self) -> str:
        """Return the name of the function."""
        return self.code.co_name

    def __str__(self) -> str:
        """Return ``file:line (function)``."""
        return f"{self.file}:{self.line} ({self.function})"


def running_code(between: tuple[str, ...], most: int) -> tuple[CodePlace, ...]:
    """Return where whoever calls stands, innermost first.

    Args:
        between: beginnings of the files whose code is left out.
        most: no more places than these.
    """
    found: list[CodePlace] = []
    frame: Any = sys._getframe(1)
    left_out = _left_out.setdefault(between, {})
    while frame is not None and len(found) < most:
        code = frame.f_code
        file = code.co_filename
        if file not in left_out:
            left_out[file] = file.startswith(between)
        if not left_out[file]:
            found.append(CodePlace(code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


_left_out: dict[tuple[str, ...], dict[str, bool]] = {}
"""Whether a file is left out, by the beginnings of those that are: asked for every frame of every tensor."""


@lru_cache(maxsize=4096)
def _below(file: str, folders: tuple[str, ...]) -> str:
    for folder in sorted(filter(None, folders), key=len, reverse=True):
        try:
            return Path(file).relative_to(folder).as_posix()
        except ValueError:
            continue
    return file
