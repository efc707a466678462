"""Reading of a checkpoint's shards for torch's and megatron-core's planners, which see our index and no file.

The index was read and checked before; tensors go from the file straight into the memory that waits for them.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_train.checkpoint.archive import StoredTensor, find_tensor, read_archive
from mindspeed_train.checkpoint.index import Chunk, Index, Place
from mindspeed_train.checkpoint.opened_files import ANOTHER, Part, open_inside

_EXTRA_STATE = "_extra_state"


class ShardReader(StorageReader):
    """A reader for ``torch.distributed.checkpoint`` with an index that was read and checked before."""

    def __init__(self, directory: Path, index: Index, *, trusted: bool = False) -> None:
        """Read nothing yet.

        Args:
            directory: the checkpoint.
            index: what `read_index` returned for it.
            trusted: take objects of unknown classes as records, and pass on what layers unpickle themselves.
        """
        self._directory, self._index, self._trusted = directory, index, trusted
        self._chunks = {
            (key, chunk.offsets): (chunk, entry.torch_dtype)
            for key, entry in index.tensors.items()
            for chunk in entry.chunks
        }
        self.metadata = as_metadata(index)

    @property
    def checkpoint_id(self) -> str:
        """Return the checkpoint's directory."""
        return str(self._directory)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Keep the index: there is none but the one that was checked."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in torch's classes; no file is read."""
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **named: Any
    ) -> None:
        """Need nothing of what torch hands back."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return whether a checkpoint may be named so."""
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, file by file.

        Raises:
            CheckpointError: a shard is damaged or forged.
        """
        items: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[self._place(item).file].append(item)
        for name, wanted in items.items():
            with open_inside(self._directory, name) as descriptor:
                opened = _Opened(self._directory / name, descriptor)
                for item in sorted(wanted, key=lambda item: self._place(item).offset):
                    if item.type == LoadItemType.BYTE_IO:
                        _put_object(planner, item.dest_index.fqn, self._value(opened, item.storage_index.fqn))
                    else:
                        self._read_tensor(opened, planner, item)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_objects(self, keys: Iterable[str], check: Callable[[str, Any, str], None]) -> None:
        """Read objects before any tensor is overwritten, and forget them.

        Args:
            keys: those of the objects.
            check: gets the key, value and name of each, and refuses what no run can take.

        Raises:
            CheckpointError: one is damaged or forged.
        """
        for key in keys:
            place = self._index.objects[key]
            with open_inside(self._directory, place.file) as descriptor:
                opened = _Opened(self._directory / place.file, descriptor)
                check(key, self._value(opened, key), f"{opened.path}, object {shown(key)!r}")

    def _place(self, item: ReadItem) -> Place:
        key, offset = item.storage_index.fqn, item.storage_index.offset
        if item.type == LoadItemType.BYTE_IO:
            return self._index.objects[key]
        return self._chunks[key, tuple(offset or ())][0].place

    def _value(self, opened: _Opened, key: str) -> Any:
        where = f"{opened.path}, object {shown(key)!r}"
        return read_object(opened.part(self._index.objects[key]), key, where, trusted=self._trusted)

    def _read_tensor(self, opened: _Opened, planner: LoadPlanner, item: ReadItem) -> None:
        key = item.storage_index.fqn
        chunk, dtype = self._chunks[key, tuple(item.storage_index.offset or ())]
        target = planner.resolve_tensor(item).detach()
        _read_into(target, opened, chunk, dtype, key, tuple(item.storage_offsets), tuple(item.lengths))
        planner.commit_tensor(item, target)


class _Opened:
    """An open shard file; remembers the archive that was looked at last."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._last: tuple[Place, Part, StoredTensor | torch.Tensor] | None = None

    def part(self, place: Place) -> Part:
        return Part(self._descriptor, place.offset, place.length)

    def tensor(self, place: Place, where: str) -> tuple[Part, StoredTensor | torch.Tensor]:
        if self._last is None or self._last[0] != place:
            part = self.part(place)
            self._last = place, part, find_tensor(part, where)
        return self._last[1:]


def _read_into(
    target: torch.Tensor,
    opened: _Opened,
    chunk: Chunk,
    dtype: torch.dtype,
    key: str,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
) -> None:
    """Fill a tensor with a region of a stored chunk."""
    where = f"{opened.path}, tensor {shown(key)!r}"
    part, stored = opened.tensor(chunk.place, where)
    if tuple(stored.shape) != chunk.sizes or stored.dtype != dtype:
        raise CheckpointError(
            f"{where}: is {list(stored.shape)} of {stored.dtype}, and its index says {list(chunk.sizes)} of "
            f"{dtype}; the file is damaged or forged; {ANOTHER}"
        )
    if any(at + length > size for at, length, size in zip(offsets, lengths, chunk.sizes)):
        raise CheckpointError(f"{where}: the part that is asked for lies outside of it; {ANOTHER}")
    if target.size() != torch.Size(lengths):
        raise CheckpointError(f"{where}: {list(lengths)} of it are loaded into {list(target.shape)}")
    if not target.numel():
        return
    if isinstance(stored, torch.Tensor):
        target.copy_(_narrowed(stored, offsets, lengths))
        return
    # A range of rows lies in one piece.
    rows = not lengths or lengths[1:] == chunk.sizes[1:]
    begin = stored.begin
    if rows:
        width = dtype.itemsize
        for size in chunk.sizes[1:]:
            width *= size
        begin += width * (offsets[0] if offsets else 0)
        shape = lengths
    else:
        shape = chunk.sizes
    direct = rows and target.dtype == dtype and type(target) is torch.Tensor
    if direct and target.device.type == "cpu" and target.is_contiguous():
        _fill(part, begin, target)
        return
    read = torch.empty(shape, dtype=dtype)
    _fill(part, begin, read)
    target.copy_(read if rows else _narrowed(read, offsets, lengths))


def _fill(part: Part, begin: int, tensor: torch.Tensor) -> None:
    part.read_into(begin, tensor.reshape(-1).view(torch.uint8).numpy().data)


def _narrowed(tensor: torch.Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> torch.Tensor:
    for axis, (offset, length) in enumerate(zip(offsets, lengths)):
        tensor = tensor.narrow(axis, offset, length)
    return tensor


def read_object(part: Part, key: str, where: str, *, trusted: bool = False) -> Any:
    """Return the value of an object shard.

    Raises:
        CheckpointError: it is damaged or forged, or holds what a layer would unpickle itself.
    """
    found = read_archive(part, where, trusted=trusted)
    if _EXTRA_STATE in key and not trusted and _is_pickled(found):
        raise CheckpointError(
            f"{where}: holds bytes that TransformerEngine unpickles itself, which could run foreign code; "
            "--trust-checkpoint passes them on, if you trust where they come from"
        )
    return found


def _is_pickled(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_pickled, value))
    if isinstance(value, dict):
        return any(map(_is_pickled, value.values()))
    if isinstance(value, torch.Tensor):
        return value.dtype == torch.uint8 and value.numel() > 0
    if isinstance(value, io.BytesIO):
        return bool(value.getbuffer().nbytes)
    return isinstance(value, bytes) and bool(value)


def _put_object(planner: Any, key: str, value: Any) -> None:
    """Hand an object to torch's planner, which would unpickle its bytes."""
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[key], value)
    else:
        planner.state_dict[key] = value


def as_metadata(index: Index) -> Metadata:
    """Return an index in the classes that torch's planners read."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for key, entry in index.tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
        properties = TensorProperties(dtype=entry.torch_dtype)
        described[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    places: dict[MetadataIndex, Place] = {
        MetadataIndex(key, chunk.offsets): chunk.place
        for key, entry in index.tensors.items()
        for chunk in entry.chunks
    }
    for key, place in index.objects.items():
        described[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = place
    found = Metadata(described, storage_data=places, storage_meta=StorageMeta())
    # megatron-core 0.15 asks for the shapes of tensors before they were flattened.
    vars(found)["mcore_data"] = {
        key: {"nd_reformulated_orig_global_shape": shape} for key, shape in index.reformulated.items()
    }
    return found


@contextmanager
def the_only_reader(reader: ShardReader) -> Iterator[None]:
    """Let megatron-core read with ``reader`` in this block, and torch unpickle nothing at all.

    megatron-core opens a reader of its own, by the name of the directory; no argument replaces it.
    """
    from megatron.core.dist_checkpointing.strategies import torch as strategies

    closed = _Closed()
    before = strategies._get_filesystem_reader, filesystem.pickle, torch.load
    try:
        vars(strategies)["_get_filesystem_reader"] = lambda *given, **named: reader
        vars(filesystem)["pickle"], vars(torch)["load"] = closed, closed.load
        yield
    finally:
        vars(strategies)["_get_filesystem_reader"], vars(filesystem)["pickle"], vars(torch)["load"] = before


class _Closed:
    """Stand-in for what reads pickles, so that whatever still asks for it ends there."""

    def load(self, *given: Any, **named: Any) -> NoReturn:
        raise CheckpointError("a part of a checkpoint was about to be unpickled, which nothing here may do")
