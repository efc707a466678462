"""The bytes that ``torch.save`` puts around those of a tensor.

A checkpoint's shards are small archives, each with one tensor. All of it but the tensor's own bytes and their
CRC-32 follows from dtype and shape, so it is made once, and whoever writes the bytes needs no torch.
"""

from __future__ import annotations

import io
import pickle
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch

from mindspeed_train.checkpoint.archive_layout import (
    CENTRAL,
    END,
    END64,
    HAS_DESCRIPTOR,
    IN_ZIP64,
    LOCAL,
    LOCATOR64,
    SIZES64,
)
from mindspeed_train.checkpoint.shard_files import Piece

_ROOT = "archive"
_ZIP64_VERSION = 45
_DESCRIPTOR_SIZE = 24
_CRC_IN_ENTRY = 16
_DATE = 1 << 5 | 1
"""The first day that a zip file knows: the same state is the same bytes."""


def around(shape: Sequence[int], dtype: torch.dtype) -> tuple[bytes, tuple[Piece, ...]]:
    """Return what comes before and after the bytes of a contiguous tensor, with their CRC-32 as None."""
    # Pages that nobody touches cost nothing.
    stand_in = torch.empty(tuple(shape), dtype=dtype)
    size = stand_in.numel() * stand_in.element_size()
    before = bytearray()
    directory = bytearray()
    records = {
        "data.pkl": _pickled(stand_in),
        "byteorder": sys.byteorder.encode(),
        "version": b"3\n",
    }
    for record, content in records.items():
        name, crc, length = f"{_ROOT}/{record}".encode(), zlib.crc32(content), len(content)
        central = (b"PK\x01\x02", 0, 0, 0, 0, 0, _DATE, crc, length, length, len(name), 0, 0, 0, 0, 0)
        directory += CENTRAL.pack(*central, len(before)) + name
        before += LOCAL.pack(b"PK\x03\x04", 0, 0, 0, 0, _DATE, crc, length, length, len(name), 0) + name
        before += content
    # The tensor comes last, with sizes of eight bytes, so that all that differs is its length.
    name, offset, extra = f"{_ROOT}/data/0".encode(), len(before), SIZES64.pack(1, 16, size, size)
    version, flags = _ZIP64_VERSION, HAS_DESCRIPTOR
    local = (b"PK\x03\x04", version, flags, 0, 0, _DATE, 0, IN_ZIP64, IN_ZIP64, len(name), len(extra))
    before += LOCAL.pack(*local) + name + extra
    begin = len(before) + size + _DESCRIPTOR_SIZE
    lengths = (IN_ZIP64, IN_ZIP64, len(name), len(extra))
    central = (b"PK\x01\x02", version, version, flags, 0, 0, _DATE, 0, *lengths, 0, 0, 0, 0)
    entry = CENTRAL.pack(*central, offset)
    middle = size.to_bytes(8, "little") * 2 + directory + entry[:_CRC_IN_ENTRY]
    directory += entry + name + extra
    count, end = len(records) + 1, begin + len(directory)
    ends = END64.pack(
        b"PK\x06\x06", END64.size - 12, version, version, 0, 0, count, count, len(directory), begin
    )
    ends += LOCATOR64.pack(b"PK\x06\x07", 0, end, 1)
    ends += END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), IN_ZIP64, 0)
    rest = entry[_CRC_IN_ENTRY + 4 :] + name + extra + ends
    return bytes(before), (b"PK\x07\x08", None, middle, None, rest)


def _pickled(tensor: torch.Tensor) -> bytes:
    """Return what ``torch.save`` pickles of a tensor, which refers to its bytes as record 0."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if isinstance(value, torch.storage.TypedStorage):
                kind = getattr(torch, value._pickle_storage_type())
                return "storage", kind, "0", "cpu", value._size()
            if isinstance(value, torch.UntypedStorage):
                return "storage", torch.UntypedStorage, "0", "cpu", value.nbytes()
            return None

    content = io.BytesIO()
    Pickler(content, protocol=2).dump(tensor)
    return content.getvalue()
