"""The timers of megatron-core as ranges of a trace: passes, transfers, parts of an update."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function


class TimerRanges:
    """Hears of timers and opens a range of their name for each."""

    def __init__(self) -> None:
        """Begin without open ranges."""
        self._open: dict[str, list[Any]] = {}

    def timer_started(self, name: str, level: int, barrier: bool) -> None:
        """Open a range."""
        opened = record_function(name)
        opened.__enter__()
        self._open.setdefault(name, []).append(opened)

    def timer_stopped(self, name: str, barrier: bool) -> None:
        """Close the range that was opened last under the name."""
        opened = self._open.get(name)
        if opened:
            opened.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Close what is open: the parts of a step that failed."""
        for opened in (one for ranges in self._open.values() for one in reversed(ranges)):
            opened.__exit__(None, None, None)
        self._open.clear()
