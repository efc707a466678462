"""Ranges of a trace: what megatron-core times (passes, transfers, parts of an update), and waits by group."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from mindspeed_megatron.instruments.communication import Call

WAIT = "wait "
"""Begins the names of ranges in which a rank waits: ``wait TENSOR_MODEL_PARALLEL_GROUP``."""


class StepRanges:
    """Hears of timers and waits, and opens a range for each."""

    def __init__(self) -> None:
        """Begin without open ranges."""
        self._open: dict[str, list[Any]] = {}

    def timer_started(self, name: str, level: int, barrier: bool) -> None:
        """Open a range."""
        self._enter(name)

    def timer_stopped(self, name: str, barrier: bool) -> None:
        """Close the range that was opened last under the name."""
        self._leave(name)

    def call_made(self, call: Call) -> None:
        """Take no notice: the trace has the operators of communication."""

    def wait_started(self, call: Call) -> None:
        """Open a range of the group that is waited for."""
        if len(call.ranks) > 1:
            self._enter(WAIT + call.group)

    def wait_stopped(self, call: Call) -> None:
        """Close it."""
        if len(call.ranks) > 1:
            self._leave(WAIT + call.group)

    def close(self) -> None:
        """Close what is open: the parts of a step that failed."""
        for opened in (one for ranges in self._open.values() for one in reversed(ranges)):
            opened.__exit__(None, None, None)
        self._open.clear()

    def _enter(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()
        self._open.setdefault(name, []).append(opened)

    def _leave(self, name: str) -> None:
        opened = self._open.get(name)
        if opened:
            opened.pop().__exit__(None, None, None)
