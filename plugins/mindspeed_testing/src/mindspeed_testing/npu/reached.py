"""Uses of torch_npu that a test run reached.

The interpreter reports every line of the files that use torch_npu while tests run, and nothing of other
files. A call counts as run when its lines were entered and left without an exception, or when the stand-in
runtime refused what it asked for: then its arguments were understood. Any other exception proves nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

from mindspeed_core.platforms.torch_npu_uses import ApiUse

_REFUSED = "507899"
"""Answer of the stand-in runtime; torch_npu puts it into its exceptions."""

_Lines = Mapping[int, tuple[ApiUse, ...]]


class ReachedUses:
    """A watch on the ``uses`` that run between `start` and `stop`.

    Attributes:
        reached: the calls that returned, or that the stand-in runtime refused.
    """

    def __init__(self, uses: Iterable[ApiUse]) -> None:
        """Watch the calls among ``uses``; mentions are not executed as such."""
        self.uses = tuple(use for use in uses if use.is_call)
        self.reached: set[ApiUse] = set()
        files: dict[str, dict[int, list[ApiUse]]] = defaultdict(lambda: defaultdict(list))
        for use in self.uses:
            for line in range(use.line, use.last_line + 1):
                files[os.path.realpath(use.path)][line].append(use)
        self._files: dict[str, _Lines] = {
            path: {line: tuple(found) for line, found in lines.items()} for path, lines in files.items()
        }
        self._known: dict[CodeType, _Lines | None] = {}

    def start(self) -> None:
        """Begin to watch this thread and those started from now on."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def stop(self) -> None:
        """End watching."""
        sys.settrace(None)
        threading.settrace(None)

    def missed(self) -> list[ApiUse]:
        """Return the calls that did not run and have no excuse."""
        return [use for use in self.uses if use not in self.reached and not use.excuse]

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        try:
            lines = self._known[code]
        except KeyError:
            lines = self._known[code] = self._lines(code)
        return None if lines is None else _Frame(lines, self.reached).line

    def _lines(self, code: CodeType) -> _Lines | None:
        if not code.co_filename.endswith(".py"):
            return None
        lines = self._files.get(os.path.realpath(code.co_filename))
        if lines is None:
            return None
        last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
        # Inner functions report for themselves; what counts is whether this code can meet a watched line.
        return lines if any(code.co_firstlineno <= line <= last for line in lines) else None


class _Frame:
    """One running function: the calls whose lines it is in."""

    def __init__(self, lines: _Lines, reached: set[ApiUse]) -> None:
        self._lines, self._reached = lines, reached
        self._inside: set[ApiUse] = set()

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "exception":
            if _REFUSED in str(argument[1]):
                self._reached.update(self._inside)
            self._inside.clear()
            return self.line
        here = self._lines.get(frame.f_lineno, ()) if event == "line" else ()
        self._reached.update(use for use in self._inside if use not in here)
        self._inside = set(here)
        return self.line
