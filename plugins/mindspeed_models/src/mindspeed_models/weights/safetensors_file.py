"""One safetensors file: its header, checked against its length, and ranges of rows and columns.

Reads go straight into the tensor that is returned, so that a process holds what it asked for and no page of
the file beside it. The format is the library's: eight bytes of length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import DataError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100 << 20
_AGAIN = "copy the file again"


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: dtype, shape, and where its bytes begin."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        """Return its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file by name, in the order of the file.

    Raises:
        DataError: it is missing, truncated or damaged; names the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(_LENGTH.size)
            length = _LENGTH.unpack(first)[0] if len(first) == _LENGTH.size else -1
            if not 0 < length <= min(size - _LENGTH.size, _LARGEST_HEADER):
                raise DataError(f"{path}: is truncated, or no safetensors file; {_AGAIN}")
            found = json.loads(file.read(length))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}; check the folder") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: its header is damaged ({error}); {_AGAIN}") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: its header is damaged; {_AGAIN}")
    begin = _LENGTH.size + length
    return {
        name: _stored(path, name, entry, begin, size)
        for name, entry in found.items()
        if name != "__metadata__"
    }


def _stored(path: Path, name: str, entry: Mapping[str, Any], begin: int, size: int) -> Stored:
    try:
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(int(each) for each in entry["shape"])
        start, stop = (int(each) for each in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        kind = entry.get("dtype") if isinstance(entry, dict) else None
        reason = f"dtype {kind!r} is not supported" if kind not in DTYPES else "its entry is damaged"
        raise DataError(f"{path}: tensor {name!r}: {reason}; {_AGAIN}") from error
    stored = Stored(dtype, shape, begin + start)
    if min(shape, default=0) < 0 or start < 0 or stop - start != stored.bytes:
        raise DataError(f"{path}: tensor {name!r}: its sizes contradict each other; {_AGAIN}")
    if begin + stop > size:
        raise DataError(
            f"{path}: is truncated: tensor {name!r} ends at byte {begin + stop}, the file at {size}; {_AGAIN}"
        )
    return stored


class SafetensorsFile:
    """An open file.

    Attributes:
        path: the file.
        stored: its tensors by name.
        bytes_read: bytes of tensors that were read so far.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DataError: see `read_header`.
        """
        self.path = path
        self.stored = read_header(path)
        self.bytes_read = 0
        self._descriptor: int | None = None

    def read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Read a tensor, a range of its rows (axis 0), or of its rows and columns (axis 1).

        Raises:
            DataError: the file cannot be read.
        """
        stored = self.stored[name]
        shape = list(stored.shape)
        row = stored.dtype.itemsize * math.prod(shape[1:])
        begin = stored.begin
        if rows is not None:
            shape[0], begin = rows[1] - rows[0], begin + rows[0] * row
        if columns is None or len(shape) < 2 or columns == (0, shape[1]):
            result = torch.empty(shape, dtype=stored.dtype)
            self._fill(bytes_of(result), begin)
            return result
        inner = row // shape[1] if shape[1] else 0
        shape[1] = columns[1] - columns[0]
        result = torch.empty(shape, dtype=stored.dtype)
        content, part = bytes_of(result), shape[1] * inner
        for index in range(shape[0]):
            at = begin + index * row + columns[0] * inner
            self._fill(content[index * part : (index + 1) * part], at)
        return result

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _fill(self, target: memoryview, begin: int) -> None:
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDONLY)
            done = 0
            while done < len(target):
                count = os.preadv(self._descriptor, [target[done:]], begin + done)
                if count == 0:
                    raise DataError(f"{self.path}: became shorter while it was read; {_AGAIN}")
                done += count
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from error
        self.bytes_read += len(target)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    content: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(content)
