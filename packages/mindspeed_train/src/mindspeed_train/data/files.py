"""Check of a tokenized dataset (a ``.bin`` / ``.idx`` pair) before a run depends on it.

megatron-core notices a truncated file only when a sample of the missing part is read, hours into a run, and
on one rank; a wrong place of a document it never notices, and trains on other tokens. The checks here read
the index and file sizes, in blocks, and compare each field with those that it follows from; importing this
module loads neither torch nor megatron-core.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from mindspeed_core.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = dict(enumerate("uint8 int8 int16 int32 int64 float64 float32 uint16".split(), start=1))
_BLOCK = 1 << 20
_REMAKE = "copy the pair again, or make it again with prepare-text"


@dataclass(frozen=True)
class DatasetFiles:
    """The content of a dataset's index.

    Attributes:
        prefix: path of the pair without suffix.
        documents: number of documents.
        sequence_lengths: tokens of each sequence, ``[sequences]`` int32.
        tokens: tokens of all sequences.
        dtype: type of one token in the ``.bin`` file.
    """

    prefix: str
    documents: int
    sequence_lengths: np.ndarray
    tokens: int
    dtype: np.dtype

    @property
    def sequences(self) -> int:
        """Return the number of sequences; the unit in which ``--split`` divides a dataset."""
        return len(self.sequence_lengths)


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the token file."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index file."""
    return Path(f"{prefix}.idx")


def check_dataset_files(prefix: str | Path, flag: str = "--data-path") -> DatasetFiles:
    """Read the index of a dataset and compare it with the sizes of both files.

    Args:
        prefix: path of the pair without ``.bin`` / ``.idx``.
        flag: where it was given, for errors.

    Raises:
        DataError: a file is missing, damaged or does not belong to the other.
    """
    index, tokens_file = idx_path(prefix), bin_path(prefix)
    _check_presence(str(prefix), index, tokens_file, flag)
    with index.open("rb") as stream:
        header = stream.read(_HEADER.size)
        magic = header[: len(_MAGIC)]
        if magic != _MAGIC:
            raise DataError(f"{index}: is not a dataset index (starts with {magic!r}); {_REMAKE}")
        if len(header) < _HEADER.size:
            raise DataError(f"{index}: is cut off inside its header ({len(header)} bytes); {_REMAKE}")
        _, version, code, sequences, boundaries = _HEADER.unpack(header)
        if version != 1:
            raise DataError(f"{index}: has version {version}, only version 1 is known; {_REMAKE}")
        if code not in _DTYPES:
            raise DataError(f"{index}: has the unknown token type {code}; {_REMAKE}")
        size = index.stat().st_size
        expected = _HEADER.size + sequences * (4 + 8) + boundaries * 8
        # A multimodal index has one byte more per sequence.
        if size not in (expected, expected + sequences):
            raise DataError(
                f"{index}: has {size} bytes, but {sequences} sequences and {boundaries - 1} documents need "
                f"{expected}; {_REMAKE}"
            )
        lengths = np.fromfile(stream, dtype=np.int32, count=sequences)
        if sequences == 0:
            raise DataError(f"{index}: the dataset is empty; prepare it from files that contain text")
        if int(lengths.min()) < 0:
            raise DataError(f"{index}: a sequence has {int(lengths.min())} tokens; {_REMAKE}")
        dtype = np.dtype(_DTYPES[code])
        _check_pointers(index, stream, lengths, dtype.itemsize)
        _check_boundaries(index, stream, boundaries, sequences)
    tokens = int(lengths.sum(dtype=np.int64))
    actual = tokens_file.stat().st_size
    if actual != tokens * dtype.itemsize:
        problem = "is cut off" if actual < tokens * dtype.itemsize else "belongs to another index"
        raise DataError(
            f"{tokens_file}: {problem}: it has {actual} bytes, but {index.name} describes {tokens} tokens of "
            f"{dtype.itemsize} bytes = {tokens * dtype.itemsize}; {_REMAKE}"
        )
    return DatasetFiles(str(prefix), boundaries - 1, lengths, tokens, dtype)


def _check_pointers(index: Path, stream: IO[bytes], lengths: np.ndarray, width: int) -> None:
    """Compare where each sequence begins with the lengths of those before it."""
    begin = 0
    for first in range(0, len(lengths), _BLOCK):
        counts = lengths[first : first + _BLOCK].astype(np.int64) * width
        ends = begin + np.cumsum(counts)
        found = np.fromfile(stream, dtype=np.int64, count=len(counts))
        wrong = np.flatnonzero(found != ends - counts)
        if len(wrong):
            at = int(wrong[0])
            raise DataError(
                f"{index}: sequence {first + at} should begin at byte {int(ends[at] - counts[at])}, by the "
                f"lengths of those before it, and the index says {int(found[at])}; {_REMAKE}"
            )
        begin = int(ends[-1])


def _check_boundaries(index: Path, stream: IO[bytes], count: int, sequences: int) -> None:
    """Check that documents begin with the first sequence, end with the last, and follow on each other."""
    last = 0
    for first in range(0, count, _BLOCK):
        found = np.fromfile(stream, dtype=np.int64, count=min(_BLOCK, count - first))
        if not first and int(found[0]) != 0:
            raise DataError(f"{index}: the first document begins at sequence {int(found[0])}; {_REMAKE}")
        if int(found[0]) < last or (np.diff(found) < 0).any():
            raise DataError(f"{index}: a document ends before it begins; {_REMAKE}")
        last = int(found[-1])
    if not count or last != sequences:
        raise DataError(f"{index}: document boundaries do not match its {sequences} sequences; {_REMAKE}")


def token_counts(prefix: str | Path) -> np.ndarray:
    """Count how often each id occurs in a dataset: ``[largest id + 1]`` int64.

    Raises:
        DataError: see `check_dataset_files`.
    """
    files = check_dataset_files(prefix)
    counts = np.zeros(0, dtype=np.int64)
    if files.tokens == 0:
        return counts
    tokens = np.memmap(bin_path(prefix), dtype=files.dtype, mode="r")
    block = 1 << 22
    for start in range(0, len(tokens), block):
        part = np.bincount(tokens[start : start + block].astype(np.int64), minlength=len(counts))
        part[: len(counts)] += counts
        counts = part
    return counts


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type megatron-core gives the tokens of a vocabulary: two bytes where they suffice."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def write_index(
    path: str | Path, lengths: np.ndarray, dtype: np.dtype, sequences: np.ndarray | None = None
) -> None:
    """Write the index of a dataset as megatron-core's builder does.

    Args:
        path: the ``.idx`` file.
        lengths: tokens of each sequence, ``[sequences]`` int32.
        dtype: type of a token in the ``.bin`` file.
        sequences: how many sequences each document has, ``[documents]``; None for one.
    """
    code = next(code for code, known in _DTYPES.items() if np.dtype(known) == dtype)
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    each = np.ones(len(lengths), dtype=np.int64) if sequences is None else sequences
    bounds = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(each, dtype=np.int64)])
    with Path(path).open("wb") as stream:
        stream.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(bounds)))
        stream.write(lengths.astype("<i4").tobytes())
        stream.write((ends - lengths.astype(np.int64) * dtype.itemsize).astype("<i8").tobytes())
        stream.write(bounds.astype("<i8").tobytes())


def largest_token(files: DatasetFiles, limit: int = 1 << 20) -> int:
    """Return the largest id of the first ``limit`` tokens, -1 for none; enough to find a wrong tokenizer."""
    if files.tokens == 0:
        return -1
    tokens = np.memmap(bin_path(files.prefix), dtype=files.dtype, mode="r", shape=(min(files.tokens, limit),))
    return int(tokens.max())


def _check_presence(prefix: str, index: Path, tokens_file: Path, flag: str) -> None:
    missing = [file for file in (index, tokens_file) if not os.path.isfile(file)]
    if not missing:
        return
    stem = prefix[:-4] if prefix.endswith((".bin", ".idx")) else ""
    if stem and os.path.isfile(idx_path(stem)):
        raise DataError(f"{flag} {prefix!r}: give the prefix of the pair, {stem!r}, without its suffix")
    if len(missing) == 2:
        raise DataError(
            f"{flag} {prefix!r}: neither {index} nor {tokens_file} exists; check the path, or make the "
            "dataset with prepare-text --output-prefix"
        )
    raise DataError(f"{missing[0]}: is missing, its partner is there; the dataset is incomplete: {_REMAKE}")
