"""Files of a checkpoint, opened so that nothing outside of it is read, and read by position.

A name in an index or a manifest is foreign text, and so is a symbolic link. Only the folder that the user
named may be a link itself.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import clean
from mindspeed_train.checkpoint.os_errors import explain

ANOTHER = "choose another checkpoint with --ckpt-step"
_WINDOW = 1 << 14


class Part:
    """A part of an open file, or some bytes, read by position.

    Attributes:
        size: of the part in bytes.
    """

    def __init__(self, descriptor: int, begin: int, size: int) -> None:
        """Read nothing yet; the descriptor stays open as long as the part is used."""
        self.size = size
        self._descriptor, self._begin = descriptor, begin
        # Headers lie at the begin and the end: two reads for most archives.
        window = min(size, _WINDOW)
        self._head = self._pread(0, window)
        self._tail = self._head if size <= _WINDOW else self._pread(size - window, window)

    @staticmethod
    def of(content: bytes) -> Part:
        """Return bytes in memory as a part."""
        part = Part.__new__(Part)
        part.size, part._descriptor, part._begin = len(content), -1, 0
        part._head = part._tail = content
        return part

    def read(self, at: int, length: int) -> bytes:
        """Return ``length`` bytes from ``at`` on, fewer where the part ends before."""
        at, end = max(at, 0), min(at + max(length, 0), self.size)
        if end <= len(self._head):
            return self._head[at:end]
        first = self.size - len(self._tail)
        if at >= first:
            return self._tail[at - first : end - first]
        return self._pread(at, end - at)

    def read_into(self, at: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``at`` on.

        Raises:
            ValueError: the part ends before.
        """
        if at < 0 or at + len(target) > self.size:
            raise ValueError("it ends before what it describes")
        if at + len(target) <= len(self._head):
            target[:] = self._head[at : at + len(target)]
            return
        done = 0
        while done < len(target):
            count = os.preadv(self._descriptor, [target[done:]], self._begin + at + done)
            if not count:
                raise ValueError("the file ends before what it describes")
            done += count

    def _pread(self, at: int, length: int) -> bytes:
        found = bytearray(length)
        done, view = 0, memoryview(found)
        while done < length:
            count = os.preadv(self._descriptor, [view[done:]], self._begin + at + done)
            if not count:
                raise ValueError("the file ends before what it describes")
            done += count
        return bytes(found)


def shown_path(directory: Path, name: str) -> str:
    """Return the path of a file whose name is foreign text, for messages."""
    return f"{directory}{os.sep}{clean(name)}"


def inside(directory: Path, name: str) -> Path:
    """Return the real path of a file in a checkpoint.

    Args:
        directory: the checkpoint; may be a link itself.
        name: the file, relative to it.

    Raises:
        CheckpointError: it lies outside, also where a link leads there.
    """
    path, parts = shown_path(directory, name), Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\0" in name:
        raise CheckpointError(f"{directory}: names a file outside the checkpoint: {name!r}; {ANOTHER}")
    real = Path(os.path.realpath(directory / name))
    if not real.is_relative_to(os.path.realpath(directory)):
        raise CheckpointError(
            f"{path}: is a link to {clean(str(real))}, outside the checkpoint, and is not followed; copy the "
            f"file to its place, or {ANOTHER}"
        )
    return real


@contextmanager
def open_inside(directory: Path, name: str) -> Iterator[int]:
    """Open a regular file of a checkpoint for reading in a ``with`` block; yields its descriptor.

    Raises:
        CheckpointError: it is missing, is no file, lies outside, or cannot be read.
    """
    path = shown_path(directory, name)
    real = inside(directory, name)
    try:
        # Whoever puts a link or a pipe there after the look above gets an error.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing; {ANOTHER}") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: is a link, and no file; {ANOTHER}") from error
        raise CheckpointError(f"{path}: {explain(error)}") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: is no file; {ANOTHER}")
        yield descriptor
    except OSError as error:
        raise CheckpointError(f"{path}: {explain(error)}") from error
    finally:
        os.close(descriptor)


def read_inside(directory: Path, name: str) -> bytes:
    """Return the content of a file of a checkpoint.

    Raises:
        CheckpointError: see `open_inside`.
    """
    with open_inside(directory, name) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read()


def size_inside(directory: Path, name: str) -> int:
    """Return the size of a file of a checkpoint in bytes.

    Raises:
        CheckpointError: see `open_inside`.
    """
    with open_inside(directory, name) as descriptor:
        return os.fstat(descriptor).st_size


def read_json(directory: Path, name: str) -> Any:
    """Return the value in a JSON file of a checkpoint; no key may come twice.

    Raises:
        CheckpointError: it is no JSON, or see `open_inside`.
    """
    return parse_json(read_inside(directory, name), directory / name)


def parse_json(content: bytes, where: Path | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        CheckpointError: it is none; the message begins with ``where``.
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError, MemoryError) as error:
        kind = "nested too deeply" if isinstance(error, RecursionError) else str(error) or "too large"
        raise CheckpointError(f"{where}: damaged, cannot be read ({kind}); {ANOTHER}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found
