"""megatron-core's datasets with an index cache that jobs can share.

megatron-core writes index files under their final names, where a second job may read a half-written one and a
killed job leaves one behind for good. The classes here build in a folder of their own and rename what is
complete, under a lock that lets a second job wait and reuse; a damaged file counts as missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from megatron.core.datasets import blended_dataset, gpt_dataset

from mindspeed_core.errors import DataError

_MAGIC = np.lib.format.MAGIC_PREFIX
_HEADER = re.compile(
    rb"\{'descr': '(?P<kind>[\w<>|=]{1,8})', 'fortran_order': (?P<order>True|False), "
    rb"'shape': \((?P<shape>\d{0,18}(?:, ?\d{1,18}){0,2},?)\), \} *\n"
)
_INTEGERS = re.compile(r"[<>|=]?[iu][1248]")
_LOCK = ".lock"
_BUILDING = ".building-"
_DIGESTS = "digests.json"
_CHUNK = 1 << 22

logger = logging.getLogger("mindspeed_core")


class GPTDataset(gpt_dataset.GPTDataset):
    """Samples cut from documents; named as megatron-core's, so that both find the same cache files."""

    def _build_document_sample_shuffle_indices(self) -> Any:
        folder = self.config.path_to_cache
        if folder is None:
            folder = os.path.join(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}-"
        built = through_cache(
            self.config,
            Path(folder),
            stem,
            ("document_index.npy", "sample_index.npy", "shuffle_index.npy"),
            super()._build_document_sample_shuffle_indices,
        )
        self._check_belongs(*built, where=os.path.join(folder, stem))
        return built

    def _check_belongs(self, documents: Any, samples: Any, shuffled: Any, *, where: str) -> None:
        """Refuse arrays of another dataset: every count follows from the documents and their lengths."""
        epochs, rest = divmod(len(documents), len(self.indices))
        if rest or not epochs:
            _refuse(
                f"{where}document_index.npy", f"{len(documents)} entries for {len(self.indices)} documents"
            )
        tokens = epochs * int(self.dataset.sequence_lengths[self.indices].sum(dtype="int64"))
        extra = bool(self.config.add_extra_token_to_sequence)
        # The last sample of validation may be a partial one.
        expected = (tokens - extra) // self.config.sequence_length
        if samples.ndim != 2 or samples.shape[1] != 2 or not 0 <= len(samples) - 1 - expected <= 1:
            _refuse(f"{where}sample_index.npy", f"shape {samples.shape} for {expected} samples")
        if int(samples[-1][0]) > len(documents):
            _refuse(f"{where}sample_index.npy", f"its last sample ends in document {int(samples[-1][0])}")
        if shuffled.shape != (len(samples) - 1,):
            _refuse(f"{where}shuffle_index.npy", f"shape {shuffled.shape} for {len(samples) - 1} samples")
        if not _builds():
            return
        first, last = int(self.indices.min()), int(self.indices.max())
        _check_range(f"{where}document_index.npy", documents, first, last)
        _check_range(f"{where}sample_index.npy", samples[:, 0], 0, len(documents))
        if (np.diff(samples[:, 0].astype(np.int64)) < 0).any():
            _refuse(f"{where}sample_index.npy", "its samples go backwards")
        _check_range(f"{where}sample_index.npy", samples[:, 1], 0, int(self.dataset.sequence_lengths.max()))
        _check_range(f"{where}shuffle_index.npy", shuffled, 0, len(shuffled) - 1)
        used = np.zeros(len(shuffled), dtype=bool)
        used[shuffled] = True
        if not used.all():
            _refuse(f"{where}shuffle_index.npy", "it repeats samples and leaves others out")


class BlendedDataset(blended_dataset.BlendedDataset):
    """A mix of datasets; without a cache folder its index is computed anew, as in megatron-core."""

    def _build_indices(self) -> Any:
        build = super()._build_indices
        folder = self.config.path_to_cache
        # Without a process group megatron-core's builder of a blend cannot ask which rank it is.
        if not folder or not dist.is_initialized():
            return _with_cache(self.config, None, build)
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}-"
        arrays = ("dataset_index.npy", "dataset_sample_index.npy")
        sets, samples = through_cache(self.config, Path(folder), stem, arrays, build)
        if _builds():
            where = os.path.join(folder, stem)
            if len(sets) != len(samples):
                _refuse(where + arrays[0], f"{len(sets)} entries for {len(samples)} samples")
            _check_range(where + arrays[0], sets, 0, len(self.datasets) - 1)
            _check_range(where + arrays[1], samples, 0, max(map(len, self.datasets)) - 1)
        return sets, samples


def _builds() -> bool:
    """Return whether this rank builds indices, and looks at those that are there for the others."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _check_range(path: str, values: Any, low: int, high: int) -> None:
    if len(values) and not low <= int(values.min()) <= int(values.max()) <= high:
        _refuse(path, f"values from {int(values.min())} to {int(values.max())}, and not {low} to {high}")


def _refuse(path: str, found: str) -> None:
    raise DataError(
        f"{path}: is the index of another dataset ({found}); delete it, or name another folder in "
        "--data-cache-path"
    )


def through_cache(
    config: Any, folder: Path, stem: str, arrays: Sequence[str], build: Callable[[], Any]
) -> Any:
    """Let megatron-core build or load one index; return what ``build`` returns.

    Args:
        config: its ``path_to_cache`` names another folder while the index is built.
        folder: the cache.
        stem: the beginning of the names of this index.
        arrays: the ends of the names of its arrays.
        build: builds the index and writes it to ``config.path_to_cache``, or loads it from there.

    Raises:
        OSError: the folder cannot be written, or a rank that does not build finds no index.
    """
    if not _builds() or (is_complete(folder, stem, arrays) and is_unchanged(folder, stem, arrays)):
        return _with_cache(config, folder, build)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder) as alone:
        if is_complete(folder, stem, arrays) and is_unchanged(folder, stem, arrays):
            return _with_cache(config, folder, build)
        if alone:
            for leftover in folder.glob(f"{_BUILDING}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        private = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder))
        try:
            built = _with_cache(config, private, build)
            # An index counts as there when its description is, so that comes last.
            (private / f"{stem}{_DIGESTS}").write_text(json.dumps(_digests(private, stem, arrays)))
            for name in (*arrays, _DIGESTS, "description.txt"):
                os.replace(private / f"{stem}{name}", folder / f"{stem}{name}")
        finally:
            shutil.rmtree(private, ignore_errors=True)
    return built


def is_complete(folder: Path, stem: str, arrays: Sequence[str]) -> bool:
    """Return whether all files of an index are there and as long as their headers say."""
    if not (folder / f"{stem}description.txt").is_file():
        return False
    for name in arrays:
        try:
            load_array(folder / f"{stem}{name}")
        except (OSError, ValueError):
            return False
    return True


def is_unchanged(folder: Path, stem: str, arrays: Sequence[str]) -> bool:
    """Return whether the arrays of an index are those that were built; True where no digests are kept.

    Whoever reads one flipped bit in an index trains on other samples without a word.
    """
    path = folder / f"{stem}{_DIGESTS}"
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        # An older version, or megatron-core alone, built it.
        return True
    except (OSError, ValueError, RecursionError):
        kept = None
    if kept == _digests(folder, stem, arrays):
        return True
    logger.warning(
        "%s: the index changed since it was built; it is built again", folder / f"{stem}{arrays[0]}"
    )
    return False


def _digests(folder: Path, stem: str, arrays: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in arrays:
        digest = hashlib.sha256()
        with (folder / f"{stem}{name}").open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        found[name] = digest.hexdigest()
    return found


def load_array(path: str | Path) -> Any:
    """Map an array of integers; never a pickle, nor an archive of arrays.

    Raises:
        DataError: the file is something else.
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    with open(path, "rb") as file:
        begin = file.read(len(_MAGIC) + 4)
        magic = begin[: len(_MAGIC)]
        if magic and not _MAGIC.startswith(magic):
            raise DataError(f"{path}: is no array of integers, so it is not read; delete it to have it built")
        if begin[len(_MAGIC) : -2] != b"\x01\x00":
            raise ValueError(f"{path}: is cut off, or of another version")
        length = int.from_bytes(begin[-2:], "little")
        header = _HEADER.fullmatch(file.read(length))
        size, offset = os.fstat(file.fileno()).st_size, len(begin) + length
    if header is None:
        # numpy's own reader evaluates the header, whatever is in it.
        raise ValueError(f"{path}: has no header of an array")
    kind = header["kind"].decode()
    if kind.startswith(("|O", "O")):
        raise DataError(f"{path}: holds objects, and is not read; delete it, and it is built again")
    if not _INTEGERS.fullmatch(kind):
        raise DataError(f"{path}: holds {kind!r}, no integers; delete it to have it built")
    shape = tuple(int(each) for each in header["shape"].split(b",") if each.strip())
    dtype = np.dtype(kind)
    if math.prod(shape) * dtype.itemsize != size - offset:
        raise ValueError(f"{path}: has {size - offset} bytes for the shape {shape}")
    if not math.prod(shape):
        return np.zeros(shape, dtype)
    order: Literal["F", "C"] = "F" if header["order"] == b"True" else "C"
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape, order=order)


def _with_cache(config: Any, folder: Path | None, build: Callable[[], Any]) -> Any:
    given, load = config.path_to_cache, np.load
    config.path_to_cache = None if folder is None else str(folder)
    try:
        # megatron-core would unpickle whatever lies in the place of an array.
        vars(np)["load"] = lambda path, **options: load_array(path)
        return build()
    finally:
        config.path_to_cache, vars(np)["load"] = given, load


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; yields False where the file system has no locks: renaming is enough then."""
    with (folder / _LOCK).open("a") as stream:
        alone = False
        with suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
            alone = True
        try:
            yield alone
        finally:
            with suppress(OSError):
                fcntl.flock(stream, fcntl.LOCK_UN)
