"""The data files of one rank, in torch's format, with sizes and digests of the bytes that are written."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True)
class ShardFile:
    """What goes into one file.

    Attributes:
        name: of the file.
        items: what torch plans to write, each with its tensor in host memory or its bytes.
    """

    name: str
    items: Sequence[tuple[WriteItem, torch.Tensor | io.BytesIO]]


@dataclass
class Written:
    """What was written.

    Attributes:
        digests: size in bytes and SHA-256 of each file, by name.
        results: where torch finds each item again.
    """

    digests: dict[str, tuple[int, str]]
    results: list[WriteResult]


class DigestedFile(io.RawIOBase):
    """A new file whose SHA-256 is taken while it is written, front to back.

    The first refusal of the operating system stays in ``refusal``: torch's archive writer hides it.
    """

    def __init__(self, path: Path, beat: Callable[[], None]) -> None:
        """Create the file; ``beat`` is called with every write."""
        super().__init__()
        self._file = path.open("wb")
        self._beat = beat
        self._digest = hashlib.sha256()
        self._size = 0
        self.refusal: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes."""
        try:
            self._file.write(data)
        except OSError as error:
            error.filename = self._file.name
            self.refusal = self.refusal or error
            raise
        self._digest.update(data)
        length = memoryview(data).nbytes
        self._size += length
        self._beat()
        return length

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self._size

    def writable(self) -> bool:
        """Return True."""
        return True

    def finish(self) -> tuple[int, str]:
        """Force the file to disk; its size and SHA-256."""
        self._file.flush()
        self._beat()
        os.fsync(self._file.fileno())
        self._beat()
        self._file.close()
        return self._size, self._digest.hexdigest()


def write_bytes(path: Path, content: memoryview | bytes, beat: Callable[[], None]) -> tuple[int, str]:
    """Write a file of bytes; its size and SHA-256.

    Raises:
        OSError: the operating system refused.
    """
    file = DigestedFile(path, beat)
    file.write(content)
    return file.finish()


def write_files(
    directory: Path, files: Sequence[ShardFile], beat: Callable[[], None] = lambda: None, *, threads: int = 1
) -> Written:
    """Write files, each by one thread.

    Raises:
        OSError: the operating system refused.
    """
    write = partial(_write_file, directory, beat)
    if threads > 1 and len(files) > 1:
        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(write, files))
    else:
        done = [write(file) for file in files]
    return Written(
        {file.name: digest for file, (digest, _) in zip(files, done)},
        [result for _, results in done for result in results],
    )


def _write_file(
    directory: Path, beat: Callable[[], None], planned: ShardFile
) -> tuple[tuple[int, str], list[WriteResult]]:
    file = DigestedFile(directory / planned.name, beat)
    try:
        results = [_write_item(file, item, data, planned.name) for item, data in planned.items]
        return file.finish(), results
    except Exception:
        if file.refusal is not None:
            raise file.refusal from None
        raise


def _write_item(
    file: DigestedFile, item: WriteItem, data: torch.Tensor | io.BytesIO, name: str
) -> WriteResult:
    if isinstance(data, torch.Tensor):
        data = data.detach()
        if data.untyped_storage().nbytes() != data.numel() * data.element_size():
            # torch saves the whole storage behind a view.
            data = data.clone()
    write: Any = filesystem._write_item
    accepted = inspect.signature(write).parameters
    first: list[Any] = []
    named: dict[str, Any] = {}
    # Later versions of torch transform streams, and know more than one format.
    if "transforms" in accepted:
        first.append(filesystem._StorageWriterTransforms())
    if "serialization_format" in accepted:
        named["serialization_format"] = filesystem.SerializationFormat.TORCH_SAVE
    result: WriteResult = write(*first, file, data, item, name, **named)
    return result
