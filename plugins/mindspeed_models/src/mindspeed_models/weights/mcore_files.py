"""The global tensors of a distributed checkpoint of megatron-core, read block by block without unpickling."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import CheckpointError, DataError
from mindspeed_models.weights.convert import HF
from mindspeed_models.weights.safetensors_file import bytes_of
from mindspeed_train.interface import (
    CheckpointIndex,
    FilePart,
    StoredTensor,
    TensorChunk,
    TensorEntry,
    find_checkpoint,
    find_single_checkpoint,
    find_tensor,
    open_inside,
    read_index,
)

_LAYER = re.compile(r"^(decoder\.layers|mtp\.layers)\.(\d+)\.")
_OF_THE_RUN = ("optimizer.", "features.", "chained_", "rng_state", "rerun_state_machine")
"""Beginnings of keys that are no part of a model."""


class McoreFiles:
    """The tensors of one checkpoint by key.

    Attributes:
        path: the checkpoint.
    """

    def __init__(self, folder: str | Path, step: int | None = None) -> None:
        """Find the checkpoint and read its index.

        Args:
            folder: a checkpoint, or a folder of them, of which the latest counts.
            step: this step and no other.

        Raises:
            CheckpointError: there is none, or its index is damaged.
        """
        path = _checkpoint(Path(folder), step)
        self._begin(path, read_index(path))

    @classmethod
    def of(cls, path: Path, index: CheckpointIndex) -> McoreFiles:
        """Return the tensors of a checkpoint whose index was read already."""
        made = cls.__new__(cls)
        made._begin(path, index)
        return made

    def _begin(self, path: Path, index: CheckpointIndex) -> None:
        self.path, self._index = path, index
        self._files: dict[str, int] = {}
        self._stored: dict[tuple[str, int], StoredTensor | torch.Tensor] = {}

    def __enter__(self) -> McoreFiles:
        """Use as a context manager."""
        return self

    def __exit__(self, *unused: Any) -> None:
        """Close all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @property
    def hf(self) -> Path:
        """Return the folder of what conversion kept beside the tensors; it need not exist."""
        return self.path / HF

    def keys(self) -> set[str]:
        """Return the keys of the model's tensors; those of an optimizer or of features are none."""
        return {key for key in self._index.tensors if not key.startswith(_OF_THE_RUN)}

    def spelled(self, key: str, also: Sequence[str] = ()) -> str | None:
        """Return the key under which a tensor is stored, or None: layers may be one tensor together."""
        for name in (key, *also):
            if name in self._index.tensors:
                return name
            joined = _LAYER.sub(r"\1.", name)
            if joined != name and joined in self._index.tensors:
                return joined
        return None

    def shape(self, key: str, stored: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is stored under another key perhaps."""
        shape = self._index.tensors[stored].shape
        return shape[1:] if self._layer(key, stored) is not None else shape

    def dtype(self, stored: str) -> torch.dtype:
        """Return the dtype."""
        return self._index.tensors[stored].torch_dtype

    def read(self, key: str, stored: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block of a tensor.

        Args:
            key: of the tensor.
            stored: as `spelled` returned it.
            offset: first index in each dimension.
            shape: sizes.
        """
        entry = self._index.tensors[stored]
        layer = self._layer(key, stored)
        lead = () if layer is None else (layer,)
        first, size = (*lead, *offset), (*(1 for _ in lead), *shape)
        result = torch.empty(size, dtype=entry.torch_dtype)
        for chunk in entry.chunks:
            self._copy(stored, entry, chunk, first, result)
        return result.reshape(tuple(shape))

    def _layer(self, key: str, stored: str) -> int | None:
        found = _LAYER.match(key)
        return int(found[2]) if found and not _LAYER.match(stored) else None

    def _copy(
        self, key: str, entry: TensorEntry, chunk: TensorChunk, first: Sequence[int], result: torch.Tensor
    ) -> None:
        """Copy the part of a chunk that lies in a block."""
        low = [max(a, b) for a, b in zip(first, chunk.offsets)]
        high = [min(a + n, b + m) for a, n, b, m in zip(first, result.shape, chunk.offsets, chunk.sizes)]
        if any(a >= b for a, b in zip(low, high)):
            return
        inside = [slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets)]
        target = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, first))
        if not inside:
            result.copy_(self._rows(key, chunk, 0, 1))
            return
        rows = self._rows(key, chunk, inside[0].start, inside[0].stop)
        wanted = (slice(None), *inside[1:])
        result[target] = rows[wanted]

    def _rows(self, key: str, chunk: TensorChunk, start: int, stop: int) -> torch.Tensor:
        """Read rows of one chunk."""
        place = (chunk.place.file, chunk.place.offset)
        if place[0] not in self._files:
            # Kept open: the context manager's descriptor ends with it.
            with open_inside(self.path, place[0]) as descriptor:
                self._files[place[0]] = os.dup(descriptor)
        part = FilePart(self._files[place[0]], chunk.place.offset, chunk.place.length)
        found = find_tensor(part, f"{self.path / place[0]}, tensor {key!r}")
        if isinstance(found, torch.Tensor):
            return found if not found.dim() else found[start:stop]
        if tuple(found.shape) != tuple(chunk.sizes):
            raise CheckpointError(
                f"{self.path / place[0]}: tensor {key!r} has another shape than its index says"
            )
        if not found.shape:
            result = torch.empty((), dtype=found.dtype)
            self._read_into(part, found.begin, result)
            return result
        row = found.dtype.itemsize * torch.Size(found.shape[1:]).numel()
        result = torch.empty((stop - start, *found.shape[1:]), dtype=found.dtype)
        self._read_into(part, found.begin + start * row, result)
        return result

    @staticmethod
    def _read_into(part: FilePart, begin: int, result: torch.Tensor) -> None:
        if result.numel():
            part.read_into(begin, bytes_of(result))


def _checkpoint(folder: Path, step: int | None) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder; check the path")
    single = find_single_checkpoint(str(folder)) if step is None else None
    found = single or find_checkpoint(str(folder), step, accept_unpublished=True)
    if found is None:
        raise DataError(f"{folder}: holds no checkpoint; name the folder that a training saved into")
    return found.path
