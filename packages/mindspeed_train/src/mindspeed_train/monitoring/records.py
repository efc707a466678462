"""The records of a run: ``metrics.jsonl``, of whole lines, which is moved aside but never shortened."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, overload

from mindspeed_megatron.earlier_files import move_aside, next_number
from mindspeed_train.launch import last_save

NAME = "metrics.jsonl"
_BESIDE = ("loss_curve.png", "summary.html", "summary.md")
"""Files that describe the record as a whole."""


class Records(Sequence[Mapping[str, Any]]):
    """The records of a ``metrics.jsonl``, read when they are asked for: a run of weeks must not hold them."""

    def __init__(self, path: Path) -> None:
        """Read from this file, which may still grow."""
        self._path = path

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    def __len__(self) -> int:
        with self._path.open("rb") as file:
            return sum(1 for _ in file)

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | Sequence[Mapping[str, Any]]:
        return list(self)[index]


class RecordFile:
    """A file that lines are added to, each whole or not at all."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            OSError: it cannot be written to.
        """
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record.

        Raises:
            OSError: the file is as it was before.
        """
        line = json.dumps(dict(record)).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            # A disk may have room for a part of it.
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, size)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def go_back_to(run_dir: Path, step: int) -> Path | None:
    """Keep the records of a run's folder up to a step, and move later ones into a file of their own.

    Where none is left the files beside them are moved aside too, with the same number, and at step 0 the note
    of the last save. A last line that was cut short is no record.

    Returns:
        The file with the later records; None where there are none.

    Raises:
        OSError: a file cannot be written; the record is as it was.
    """
    path = run_dir / NAME
    if not step:
        # Nothing of this run is saved yet.
        move_aside(run_dir, (last_save.FILE,))
    if not path.exists():
        return None
    kept, later, cut = _split(path.read_text(encoding="utf-8", errors="replace"), step)
    number = next_number(run_dir, (NAME, *_BESIDE))
    moved = path.with_name(f"{path.stem}.{number}{path.suffix}")
    if later:
        _write(moved, later)
    if later or cut:
        _write(path, kept)
    if later and not kept:
        move_aside(run_dir, _BESIDE, number)
    return moved if later else None


def last_step(run_dir: Path) -> int:
    """Return the last step in the records of a run's folder; 0 where there are none."""
    path = run_dir / NAME
    try:
        steps = [_step_of(line) for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return 0
    return max((step for step in steps if step is not None), default=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the records of a ``metrics.jsonl``."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _split(text: str, step: int) -> tuple[list[str], list[str], bool]:
    """Return the lines up to a step, the others, and whether a line was cut short."""
    kept: list[str] = []
    later: list[str] = []
    cut = False
    for line in text.splitlines(keepends=True):
        found = _step_of(line)
        if not line.endswith("\n") and found is None:
            cut = True
            continue
        whole = line if line.endswith("\n") else f"{line}\n"
        (kept if found is not None and found <= step else later).append(whole)
    return kept, later, cut


def _step_of(line: str) -> int | None:
    """Return the step of a record; None where a line is none."""
    with suppress(ValueError, RecursionError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("step", 0), int):
            return int(record.get("step", 0))
    return None


def _write(path: Path, lines: Sequence[str]) -> None:
    beside = path.with_name(f"{path.name}.tmp")
    try:
        beside.write_text("".join(lines), encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise
