"""The files that one rank writes: pieces of bytes, hashed while they are written.

What a piece means was decided before. So the process that writes beside a training needs neither torch nor
the training's memory, and starts in a moment.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

Piece = bytes | memoryview | tuple[int, int] | None
"""Bytes; where some lie in shared memory (offset and length); or None for the CRC-32 of the piece before."""

Digests = dict[str, tuple[int, str]]
"""Size in bytes and SHA-256 of each file, by name."""

_CHUNK = 1 << 18
"""Bytes that stay in a core's cache while they are hashed, summed and written."""
_CRC_SIZE = 4


@dataclass(frozen=True)
class ShardFile:
    """Content of one file.

    Attributes:
        name: of the file.
        items: the pieces of each tensor or object in it.
    """

    name: str
    items: Sequence[Sequence[Piece]]


def length_of(pieces: Sequence[Piece]) -> int:
    """Return the length of pieces in bytes."""
    return sum(
        _CRC_SIZE if piece is None else piece[1] if isinstance(piece, tuple) else len(piece)
        for piece in pieces
    )


def write_files(
    folder: Path,
    files: Sequence[ShardFile],
    beat: Callable[[], None] = lambda: None,
    *,
    shared: memoryview | None = None,
    threads: int = 1,
) -> Digests:
    """Write files, each by one thread, and force them to disk.

    Args:
        folder: receives them.
        files: their names and contents.
        beat: is called whenever the work got further.
        shared: the memory that pieces refer to.
        threads: how many files are written at the same time.

    Raises:
        OSError: the operating system refused.
    """
    write = partial(_write_file, folder, beat, shared)
    if threads > 1 and len(files) > 1:
        with ThreadPoolExecutor(threads) as pool:
            done = list(pool.map(write, files))
    else:
        done = [write(file) for file in files]
    return {file.name: digest for file, digest in zip(files, done)}


def _write_file(
    folder: Path, beat: Callable[[], None], shared: memoryview | None, planned: ShardFile
) -> tuple[int, str]:
    digest, size, path = hashlib.sha256(), 0, folder / planned.name
    try:
        with path.open("wb") as file:
            for chunk in _chunks(planned, shared):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                beat()
            file.flush()
            beat()
            os.fsync(file.fileno())
            beat()
    except OSError as error:
        # Not every refusal of the system names the file.
        error.filename = error.filename or str(path)
        raise
    return size, digest.hexdigest()


def _chunks(planned: ShardFile, shared: memoryview | None) -> Iterator[bytes | memoryview]:
    for pieces in planned.items:
        crc = 0
        for piece in pieces:
            if piece is None:
                yield crc.to_bytes(_CRC_SIZE, "little")
                continue
            if isinstance(piece, tuple):
                assert shared is not None
                piece = shared[piece[0] : piece[0] + piece[1]]
            if isinstance(piece, bytes):
                yield piece
                continue
            crc = 0
            for begin in range(0, len(piece), _CHUNK):
                chunk = piece[begin : begin + _CHUNK]
                crc = zlib.crc32(chunk, crc)
                yield chunk
