"""Files of megatron-core's distributed checkpoints, written chunk by chunk without a process group.

A file is a sequence of archives of torch, one tensor each; ``.metadata`` says which chunk of which global
tensor lies where. Both are what ``torch.distributed.checkpoint`` writes and reads.
"""

from __future__ import annotations

import io
import math
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed_models.weights.safetensors_file import bytes_of
from mindspeed_models.weights.unfinished import DigestedFile
from mindspeed_train.interface import around_tensor


@dataclass(frozen=True)
class Chunk:
    """A block of a global tensor: key, first indices and sizes."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Placed:
    """A chunk, or an object (without shape), and where its archive lies in a file."""

    key: str
    offset: tuple[int, ...] | None
    shape: tuple[int, ...]
    begin: int
    length: int

    def as_list(self) -> list[Any]:
        """Return plain values."""
        return [self.key, self.offset, self.shape, self.begin, self.length]

    @classmethod
    def of_list(cls, values: Sequence[Any]) -> Placed:
        """Read what `as_list` returned."""
        key, offset, shape, begin, length = values
        return cls(key, None if offset is None else tuple(offset), tuple(shape), begin, length)


def write_tensor(file: DigestedFile, chunk: Chunk, tensor: torch.Tensor) -> Placed:
    """Append a tensor as an archive of its own."""
    begin = file.size
    before, after = around_tensor(tensor.shape, tensor.dtype)
    content = bytes_of(tensor.contiguous())
    crc = zlib.crc32(content).to_bytes(4, "little")
    for piece in (before, content, *(crc if each is None else each for each in after)):
        assert isinstance(piece, (bytes, memoryview))
        file.write(piece)
    return Placed(chunk.key, chunk.offset, chunk.shape, begin, file.size - begin)


def write_object(file: DigestedFile, key: str, value: Any) -> Placed:
    """Append an object, as megatron-core saves those of modules."""
    begin = file.size
    buffer = io.BytesIO()
    # megatron-core saves the list of the objects of a key.
    torch.save([value], buffer)
    file.write(buffer.getvalue())
    return Placed(key, None, (), begin, file.size - begin)


def metadata(
    placed: Mapping[str, Iterable[Placed]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        placed: what each file holds, by its name.
        shapes: global shape of each tensor.
        dtypes: dtype of each tensor.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    state: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for name, items in placed.items():
        for each in items:
            info = _StorageInfo(name, each.begin, each.length)
            if each.offset is None:
                state[each.key] = BytesStorageMetadata()
                storage[MetadataIndex(each.key)] = info
                continue
            if each.key not in state:
                properties = TensorProperties(dtype=dtypes[each.key])
                state[each.key] = TensorStorageMetadata(properties, torch.Size(shapes[each.key]), [])
            offset = torch.Size(each.offset)
            state[each.key].chunks.append(ChunkStorageMetadata(offset, torch.Size(each.shape)))
            storage[MetadataIndex(each.key, offset)] = info
    return pickle.dumps(Metadata(state_dict_metadata=state, storage_data=storage))


def chunks_of(
    key: str, shape: Sequence[int], itemsize: int, most: int, *, experts: bool = False
) -> list[Chunk]:
    """Cut a global tensor into chunks of whole rows, of at most ``most`` bytes where a row allows it.

    Args:
        key: of the tensor.
        shape: its global shape.
        itemsize: bytes of an element.
        most: bytes of a chunk.
        experts: the first dimension counts experts, each of which is cut by itself.
    """
    if not shape:
        return [Chunk(key, (), ())]
    axis = 1 if experts else 0
    row = itemsize * max(1, math.prod(shape[axis + 1 :]))
    step = max(1, most // row)
    found = []
    for expert in range(shape[0]) if experts else (None,):
        for start in range(0, shape[axis], step):
            rows = min(step, shape[axis] - start)
            lead = () if expert is None else (expert,)
            rest = tuple(0 for _ in shape[axis + 1 :])
            ones = () if expert is None else (1,)
            found.append(Chunk(key, (*lead, start, *rest), (*ones, rows, *shape[axis + 1 :])))
    return found
