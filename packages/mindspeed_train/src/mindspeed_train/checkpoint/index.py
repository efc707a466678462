"""The index of a checkpoint: which tensor lies where, as data.

One value for all formats. Our own checkpoints have it as JSON (`NAME`), beside the pickled ``.metadata`` that
Megatron-LM and torch read; those of other programs, and old ones of ours, have ``.metadata`` alone, which is
interpreted and never unpickled. An index that a file can give is whole: the parts of each tensor tile it, and
their bytes lie inside of the files, each once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_train.checkpoint.coverage import uncovered
from mindspeed_train.checkpoint.fields import Fields
from mindspeed_train.checkpoint.opened_files import (
    ANOTHER,
    read_inside,
    read_json,
    shown_path,
    size_inside,
)
from mindspeed_train.checkpoint.pickled_classes import DTYPES
from mindspeed_train.checkpoint.pickled_index import read_pickled_index

NAME = "index.json"
FORMAT = "mindspeed-index-1"
_PICKLED = ".metadata"
_MAX_DIMENSIONS = 16
_LARGEST = 1 << 62


@dataclass(frozen=True)
class Place:
    """Location of some bytes: a file of the checkpoint, the first byte, and their number."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor: its offsets and sizes in the whole, and the archive that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: the name of its dtype, its shape, and its parts."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype."""
        return DTYPES[self.dtype]

    @property
    def bytes(self) -> int:
        """Return the size in bytes of the whole tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Index:
    """All that a checkpoint holds beside the common state.

    Attributes:
        tensors: by key.
        objects: by key, the archive that holds each.
        reformulated: shapes before they were flattened, which old versions of megatron-core keep.
        source: the file it was read from, for messages.
    """

    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Place]
    reformulated: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    source: str = NAME

    @property
    def keys(self) -> set[str]:
        """Return the keys of tensors and objects."""
        return {*self.tensors, *self.objects}


def read_index(directory: Path, *, trusted: bool = False, with_files: bool = True) -> Index:
    """Read the index of a checkpoint, once, and check it.

    Args:
        directory: the checkpoint.
        trusted: take a pickled index whose other parts are of unknown classes.
        with_files: look at the files too, which one rank does for all.

    Raises:
        CheckpointError: it is missing, damaged or forged; the message names file and tensor.
    """
    if (directory / NAME).exists() or (directory / NAME).is_symlink():
        index = _parse(directory / NAME, read_json(directory, NAME))
    else:
        found = read_pickled_index(read_inside(directory, _PICKLED), directory / _PICKLED, trusted=trusted)
        index = _parse(directory / _PICKLED, found)
    check_coverage(directory / index.source, index)
    check_places(directory, index, with_files=with_files)
    return index


def describe(index: Index) -> str:
    """Return the text of an index as data."""
    files = sorted({place.file for place in _places(index)})
    number = {name: at for at, name in enumerate(files)}

    def place(stored: Place) -> list[int]:
        return [number[stored.file], stored.offset, stored.length]

    content = {
        "format": FORMAT,
        "files": files,
        "tensors": {
            key: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "chunks": [[list(c.offsets), list(c.sizes), *place(c.place)] for c in entry.chunks],
            }
            for key, entry in sorted(index.tensors.items())
        },
        "objects": {key: place(found) for key, found in sorted(index.objects.items())},
        "reformulated": {key: list(shape) for key, shape in sorted(index.reformulated.items())},
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _parse(path: Path, content: Any) -> Index:
    """Make an index of plain values that were read from a file."""
    root = Fields(path, content)
    if root.text("format") != FORMAT:
        raise CheckpointError(
            f"{path}: has the format {shown(root.text('format'))}, this version reads {FORMAT}; use the "
            f"version that wrote it, or {ANOTHER}"
        )
    files = [str(each) for each in root.items("files", str)]

    def place(fields: Fields, values: Any) -> Place:
        file, offset, length = fields.numbers(values, count=3, high=_LARGEST)
        if file >= len(files):
            fields.refuse("place", values, f"a file of the {len(files)} that it lists")
        return Place(files[file], offset, length)

    tensors = {}
    for key, entry in root.children("tensors"):
        dtype = entry.choice("dtype", DTYPES)
        shape = tuple(entry.numbers(entry.value("shape"), high=_LARGEST, most=_MAX_DIMENSIONS))
        chunks = []
        for chunk in entry.items("chunks", list):
            if len(chunk) != 5:
                entry.refuse("chunks", chunk, "offsets, sizes, file, offset and length")
            offsets, sizes = (
                tuple(entry.numbers(each, count=len(shape), high=_LARGEST)) for each in chunk[:2]
            )
            chunks.append(Chunk(offsets, sizes, place(entry, chunk[2:])))
        tensors[key] = TensorEntry(dtype, shape, tuple(chunks))
    objects = {key: place(root, value) for key, value in root.mapping("objects").items()}
    shapes = {
        key: tuple(root.numbers(value, high=_LARGEST, most=_MAX_DIMENSIONS))
        for key, value in root.mapping("reformulated").items()
    }
    both = tensors.keys() & objects.keys()
    if both:
        raise CheckpointError(f"{path}: {shown(min(both))!r} is a tensor and an object; {ANOTHER}")
    return Index(tensors, objects, shapes, path.name)


def check_coverage(path: Path, index: Index) -> None:
    """Check that the parts of each tensor tile it, and have the bytes that they need.

    Raises:
        CheckpointError: names file and tensor.
    """
    for key, entry in index.tensors.items():
        for chunk in entry.chunks:
            needed = math.prod(chunk.sizes) * entry.torch_dtype.itemsize
            if needed > chunk.place.length:
                raise CheckpointError(
                    f"{path}: a part of tensor {shown(key)!r} needs {needed} bytes, and has "
                    f"{chunk.place.length}; the file is damaged or forged; {ANOTHER}"
                )
        problem = uncovered(entry.shape, [(chunk.offsets, chunk.sizes) for chunk in entry.chunks])
        if problem:
            raise CheckpointError(
                f"{path}: the parts of tensor {shown(key)!r} {problem}; the file is damaged or forged; "
                f"{ANOTHER}"
            )


def check_places(directory: Path, index: Index, *, with_files: bool = True) -> None:
    """Check that all bytes lie in files of the checkpoint, each once.

    Raises:
        CheckpointError: names the file.
    """
    path = directory / index.source
    ends: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for place in sorted(_places(index), key=lambda place: (place.file, place.offset, place.length)):
        if place.file not in sizes:
            sizes[place.file] = size_inside(directory, place.file) if with_files else _LARGEST
        end = place.offset + place.length
        if end > sizes[place.file]:
            raise CheckpointError(
                f"{shown_path(directory, place.file)}: {index.source} places bytes up to {end} in it, and it "
                f"has {sizes[place.file]}; {ANOTHER}"
            )
        if place.offset < ends.get(place.file, 0):
            raise CheckpointError(
                f"{path}: places two values in the same bytes of {shown(place.file)}; the file is damaged or "
                f"forged; {ANOTHER}"
            )
        ends[place.file] = end


def _places(index: Index) -> list[Place]:
    parts = [chunk.place for entry in index.tensors.values() for chunk in entry.chunks]
    return [*parts, *index.objects.values()]
