"""A writer of checkpoints that halts where a test says so; it runs in the process beside training.

A test puts `WORK` in the place of the standalone host's ``checkpoint.save.WRITER`` and opens a `Gate` before
the first background save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mindspeed_train import interface

WORK = f"{__name__}:write_job"
MOMENTS = ("before the first byte", "between two files", "before it reports")
_FOLDER = "MINDSPEED_HELD_WRITER"


class Gate:
    """Holds a process at a moment until this one lets it pass, and tells that it got there."""

    def __init__(self, folder: Path) -> None:
        """Make a gate for the processes that this one starts; it is open."""
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[_FOLDER] = str(folder)
        self._moment = folder / "moment"
        self._pipes = [_pipe(folder / name) for name in ("arrived", "opened")]

    def hold(self, moment: str) -> None:
        """Close the gate at a moment."""
        self._moment.write_text(moment)

    def wait_until_held(self) -> None:
        """Wait for somebody to be held."""
        os.read(self._pipes[0], 1)

    def open(self) -> None:
        """Let pass who is held, and everybody after."""
        self._moment.unlink()
        os.write(self._pipes[1], b"x")

    def forget(self) -> None:
        """Open a gate at which somebody was held who is gone."""
        self._moment.unlink()

    def close(self) -> None:
        """Give the pipes back."""
        for pipe in self._pipes:
            os.close(pipe)


def pass_gate(moment: str) -> None:
    """Halt if the gate is closed at this moment."""
    folder = Path(os.environ[_FOLDER])
    if closed_at(moment):
        _use(folder / "arrived", os.O_WRONLY, lambda pipe: os.write(pipe, b"x"))
        _use(folder / "opened", os.O_RDONLY, lambda pipe: os.read(pipe, 1))


def closed_at(moment: str) -> bool:
    """Return whether the gate is closed at this moment."""
    path = Path(os.environ[_FOLDER]) / "moment"
    return path.exists() and path.read_text() == moment


def write_job(job: Mapping[str, Any], shared: memoryview, beat: Callable[[], None]) -> Any:
    """Write as the host's writer does, with a halt at the moment at which the gate is closed."""
    pass_gate(MOMENTS[0])
    if closed_at(MOMENTS[1]):
        interface.write_job({**job, "files": job["files"][:1], "upload": None}, shared, beat)
    pass_gate(MOMENTS[1])
    written = interface.write_job(job, shared, beat)
    pass_gate(MOMENTS[2])
    return written


def _pipe(path: Path) -> int:
    os.mkfifo(path)
    # Both ends: nobody waits for somebody to open the other one.
    return os.open(path, os.O_RDWR)


def _use(path: Path, flags: int, use: Callable[[int], object]) -> None:
    pipe = os.open(path, flags)
    try:
        use(pipe)
    finally:
        os.close(pipe)
