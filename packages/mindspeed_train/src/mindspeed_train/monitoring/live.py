"""The state of a run at a glance: a live line for people, ``status.json`` in the run's folder for programs.

Both say the step, the loss, tokens per second, the share of the peak (MFU) where it is measured, memory and
the time left.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mindspeed_core.terminal.listing import columns
from mindspeed_train.monitoring.step_line import memory

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

STATUS = "status.json"
TRAINING, ENDED, FAILED = "training", "ended", "failed"
_COPIED = ("loss", "tokens_per_second", "tflops_per_device", "share_of_peak", "peak_memory_bytes")
_NARROW, _WIDE = 10, 30
"""Columns of the bar, on terminals below and from 100."""


class Status:
    """The state of a run: numbers of the last logged step, how many steps there are, and the time left.

    Attributes:
        values: what ``status.json`` holds.
    """

    def __init__(self, total: int, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin before the first step.

        Args:
            total: steps of the whole run.
            start: steps already done.
            clock: gives seconds.
        """
        self.values: dict[str, Any] = {"state": TRAINING, "step": start, "total_steps": total}
        self._clock, self._start, self._began = clock, start, clock()
        self._written: float | None = None

    def step(self, numbers: Mapping[str, Any]) -> None:
        """Take the numbers of a logged step, under their names of ``metrics.jsonl``."""
        step, total = numbers["step"], self.values["total_steps"]
        done = max(1, step - self._start)
        left = (self._clock() - self._began) / done * (total - step)
        found = {name: numbers[name] for name in _COPIED if numbers.get(name) is not None}
        self.values = {"state": TRAINING, "step": step, "total_steps": total, "seconds_left": round(left, 1)}
        self.values |= found

    def write(self, folder: Path, *, at_once: bool = False) -> None:
        """Write ``status.json``, at most once a second unless ``at_once``.

        Raises:
            OSError: the folder cannot be written to.
        """
        now = self._clock()
        if not at_once and self._written is not None and now - self._written < 1.0:
            return
        self._written = now
        beside = folder / f"{STATUS}.tmp"
        beside.write_text(json.dumps(self.values) + "\n", encoding="utf-8")
        os.replace(beside, folder / STATUS)

    def __str__(self) -> str:
        """Return the numbers in a few words."""
        values, words = self.values, []
        if "loss" in values:
            words.append(f"loss {values['loss']:.4f}")
        if "tokens_per_second" in values:
            words.append(f"{values['tokens_per_second']:,.0f} tok/s")
        if "share_of_peak" in values:
            words.append(f"{values['share_of_peak']:.1%} MFU")
        if "peak_memory_bytes" in values:
            words.append(memory(values["peak_memory_bytes"]))
        return " | ".join(words)


class LiveLine:
    """A progress bar with the numbers of the last step, below the lines of a terminal."""

    def __init__(self, output: TextIO, status: Status) -> None:
        """Draw it; a thread of rich's keeps it up to date."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        wide = _WIDE if (columns(output) or 0) >= 100 else _NARROW
        self._bar: Progress = Progress(
            BarColumn(bar_width=wide),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=Console(file=output),
        )
        self._task: TaskID = self._bar.add_task(
            "training", total=status.values["total_steps"], completed=status.values["step"]
        )
        self._bar.start()

    def update(self, status: Status) -> None:
        """Show another state."""
        self._bar.update(self._task, completed=status.values["step"], description=str(status) or "training")

    def say(self, text: str) -> None:
        """Print lines above it; ``text`` may hold colours of ours.

        Raises:
            BrokenPipeError: nobody reads any more.
        """
        from rich.text import Text

        try:
            self._bar.console.print(Text.from_ansi(text), soft_wrap=True)
        except SystemExit as error:
            # A console of rich answers a reader that has gone with the end of the program.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error

    def stop(self) -> None:
        """Leave it as it is, below the last line."""
        with suppress(OSError, ValueError, SystemExit):
            self._bar.stop()
