"""Archives of ``torch.save``, read without torch's reader: values of an object, and single tensors.

Torch reads an archive with an unpickler, and what that calls depends on the file. Here the pickle inside is
interpreted, and the bytes of tensors are read from where the archive's directory says, within its bounds.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_train.checkpoint.archive_layout import members
from mindspeed_train.checkpoint.inert_pickle import Values, read_pickle
from mindspeed_train.checkpoint.opened_files import ANOTHER, Part
from mindspeed_train.checkpoint.pickle_nodes import External, Name, PickleError
from mindspeed_train.checkpoint.pickled_classes import STORAGES, VALUES

_PICKLE_BYTES = 1 << 28


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous tensor in an archive whose bytes have not been read.

    Attributes:
        dtype: of its elements.
        shape: its sizes.
        begin: where its first byte lies in the part.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def read_archive(part: Part, where: str, *, trusted: bool = False) -> Any:
    """Return the value in an archive; tensors lie in host memory.

    Args:
        part: the archive, and nothing else.
        where: the file and what is inside it, for messages.
        trusted: take unknown classes as records without behaviour.

    Raises:
        CheckpointError: it refers to something that no checkpoint needs, is damaged, or could be read in two
            ways.
    """
    found = _members(part, where)
    read: dict[str, torch.Tensor] = {}

    def external(values: Values, node: External) -> torch.Tensor:
        key, dtype, count, begin = _storage(found, values, node)
        known = read.get(key)
        if known is None:
            known = torch.empty(count, dtype=dtype)
            part.read_into(begin, known.view(torch.uint8).numpy().data if count else memoryview(bytearray()))
            read[key] = known
        elif known.dtype != dtype or known.numel() != count:
            raise PickleError("two tensors describe their bytes differently")
        return known

    return _value(part, where, found, external, trusted)


def find_tensor(part: Part, where: str) -> StoredTensor | torch.Tensor:
    """Return where the one tensor of an archive lies; the tensor itself where it is not contiguous.

    Raises:
        CheckpointError: the archive holds something else, or see `read_archive`.
    """
    found = _members(part, where)
    places: list[tuple[int, int]] = []

    def external(values: Values, node: External) -> torch.Tensor:
        _, dtype, count, begin = _storage(found, values, node)
        places.append((begin, count))
        # Its elements are never looked at: sizes and strides are checked against its length.
        return torch.empty(count, dtype=dtype, device="meta")

    described = _value(part, where, found, external, trusted=False)
    if not isinstance(described, torch.Tensor) or len(places) != 1:
        raise CheckpointError(f"{where}: holds no single tensor; the file is damaged or forged; {ANOTHER}")
    if not described.is_contiguous():
        whole = read_archive(part, where)
        assert isinstance(whole, torch.Tensor)
        return whole
    begin = places[0][0] + described.storage_offset() * described.itemsize
    return StoredTensor(described.dtype, tuple(described.shape), int(begin))


def _members(part: Part, where: str) -> dict[str, tuple[int, int]]:
    try:
        return members(part)
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"{where}: cannot be read ({first_line(error)}); the file is damaged or forged; {ANOTHER}"
        ) from error


def _value(part: Part, where: str, found: dict[str, tuple[int, int]], external: Any, trusted: bool) -> Any:
    begin, size = found["data.pkl"]
    order = part.read(*found["byteorder"]).decode("latin-1") if "byteorder" in found else sys.byteorder
    if order != sys.byteorder:
        raise CheckpointError(
            f"{where}: was written on a machine with another order of bytes; load and save it there with "
            "torch first"
        )
    if size > _PICKLE_BYTES:
        raise CheckpointError(f"{where}: describes its values in {size} bytes, more than any does; {ANOTHER}")
    content = part.read(begin, size)
    outside = part.size - size
    return read_pickle(content, where, VALUES, external=external, size=outside, trusted=trusted)


def _storage(
    found: dict[str, tuple[int, int]], values: Values, node: External
) -> tuple[str, torch.dtype, int, int]:
    """Return name, type, length and place of the bytes that a persistent id names."""
    kind, storage, key, _, count = values.sequence(node.key, 5)
    if kind != "storage" or not isinstance(storage, Name):
        raise PickleError("it refers to bytes in another way than torch does")
    name = storage.full.rpartition(".")[2].removesuffix("Storage")
    dtype, member = STORAGES.get(name), f"data/{values.text(key)}"
    if dtype is None or member not in found:
        raise PickleError("it refers to bytes that are not there")
    begin, size = found[member]
    length = values.integer(count)
    if length * dtype.itemsize != size:
        raise PickleError(f"a tensor's bytes are {size}, its description needs {length * dtype.itemsize}")
    return member, dtype, length, begin
