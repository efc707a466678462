"""The weights of a Hugging Face folder: safetensors or ``.bin`` shards behind one interface.

Numbers in 8 bits come out as bfloat16, multiplied with the scales beside them. A ``.bin`` is read by torch's
reader of weights alone, which runs nothing that the file says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

import torch

from mindspeed_core.errors import DataError
from mindspeed_models.config_file import NAME as CONFIG
from mindspeed_models.weights.safetensors_file import SafetensorsFile, Stored

SCALE = "_scale_inv"
"""End of the name of a weight's scales, behind its own name."""
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BLOCK = 128
_SHOWN = 8


class _File(Protocol):
    stored: dict[str, Stored]
    bytes_read: int

    def read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor: ...

    def close(self) -> None: ...


class _BinFile:
    """A shard that ``torch.save`` wrote; mapped, so that only what is read takes memory."""

    def __init__(self, path: Path) -> None:
        try:
            self._tensors: dict[str, torch.Tensor] = torch.load(
                path, map_location="cpu", weights_only=True, mmap=True
            )
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}; check the folder") from error
        except Exception as error:
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise DataError(
                f"{path}: is no file of weights alone ({reason}); nothing in it was run; save it as "
                "safetensors "
                "where you trust it"
            ) from error
        if not isinstance(self._tensors, dict) or not all(
            isinstance(each, torch.Tensor) for each in self._tensors.values()
        ):
            raise DataError(f"{path}: holds no tensors by name; save the model's state_dict alone")
        self.stored = {name: Stored(each.dtype, tuple(each.shape), 0) for name, each in self._tensors.items()}
        self.bytes_read = 0

    def read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        found = self._tensors[name]
        found = found if rows is None else found[rows[0] : rows[1]]
        found = found if columns is None or found.dim() < 2 else found[:, columns[0] : columns[1]]
        self.bytes_read += found.numel() * found.itemsize
        return found.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self._tensors = {}


class HfFiles:
    """The tensors of a folder by name.

    Attributes:
        folder: where they are.
        prefix: a part of names that the files leave out, and callers give.
    """

    def __init__(self, folder: str | Path, *, prefix: str = "") -> None:
        """Read the index and, of each shard, the header.

        Args:
            folder: holds ``model.safetensors``, shards with an index, or the same as ``.bin``.
            prefix: what some publishers leave out at the beginning of names.

        Raises:
            DataError: there are no weights, a shard is missing or damaged, or the index is wrong.
        """
        self.folder = Path(folder)
        self._files: dict[str, _File] = {}
        self._homes: dict[str, _File] = {}
        paths, listed = _shards(self.folder)
        for path in paths:
            self._open(path)
        absent = sorted(listed - self._homes.keys())
        if absent:
            raise DataError(
                f"{self.folder}: the index names {len(absent)} tensors that no shard holds: "
                f"{shown(absent)}; copy "
                "shards and index again"
            )
        stripped = bool(prefix) and not any(name.startswith(prefix) for name in self._homes)
        self.prefix = prefix if stripped else ""
        self._block = self._block_size()

    def __enter__(self) -> HfFiles:
        """Use as a context manager."""
        return self

    def __exit__(self, *unused: Any) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of this name."""
        return self._spelled(name) in self._homes

    @property
    def bytes_read(self) -> int:
        """Return the bytes of tensors that were read so far."""
        return sum(file.bytes_read for file in self._files.values())

    @property
    def paths(self) -> list[Path]:
        """Return the files."""
        return [self.folder / name for name in self._files]

    def names(self) -> Iterator[str]:
        """Return the names of all tensors, as callers spell them; scales of other tensors are none."""
        for name in self._homes:
            if not self._is_scale(name):
                whole = name.startswith("lm_head.")
                yield name if whole or not self.prefix else self.prefix + name

    def listing(self) -> dict[str, list[str]]:
        """Return the names of tensors by file, as the files spell them and in their order."""
        return {
            name: [each for each in file.stored if not self._is_scale(each)]
            for name, file in self._files.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives: bfloat16 for numbers in 8 bits."""
        found = self._stored(name).dtype
        return torch.bfloat16 if found in _FP8 else found

    def read(
        self, name: str, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Read a tensor, or a range of its rows and columns.

        Raises:
            DataError: it has 8 bits and no scales, or the file cannot be read.
        """
        spelled = self._spelled(name)
        home = self._homes[spelled]
        if home.stored[spelled].dtype not in _FP8:
            return home.read(spelled, rows, columns)
        return self._dequantized(spelled, rows, columns)

    def _dequantized(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> torch.Tensor:
        stored, scale = self._homes[name].stored[name], name + SCALE
        if scale not in self._homes:
            raise DataError(
                f"{self.folder}: tensor {name!r} has 8 bits and no scales ({scale}), without which its "
                "numbers "
                "mean nothing; get the complete files, or those in bfloat16"
            )
        high, wide = self._block
        shape = tuple(-(-size // block) for size, block in zip(stored.shape, (high, wide)))
        if self._homes[scale].stored[scale].shape != shape:
            raise DataError(
                f"{self.folder}: {scale!r} has shape {list(self._homes[scale].stored[scale].shape)}, "
                "blocks of "
                f"{high} x {wide} need {list(shape)}"
            )
        first, last = rows or (0, stored.shape[0])
        left, right = columns or (0, stored.shape[1])
        scales = self._homes[scale].read(scale, (first // high, -(-last // high))).float()
        scales = scales.repeat_interleave(high, 0)[first % high :][: last - first]
        scales = scales.repeat_interleave(wide, 1)[:, left:right]
        return (self._homes[name].read(name, rows, columns).float() * scales).to(torch.bfloat16)

    def _open(self, path: Path) -> None:
        file: _File = SafetensorsFile(path) if path.suffix == ".safetensors" else _BinFile(path)
        self._files[path.name] = file
        for name in file.stored:
            if name in self._homes:
                raise DataError(
                    f"{self.folder}: two files hold tensor {name!r}; remove what is not of the model"
                )
            self._homes[name] = file

    def _spelled(self, name: str) -> str:
        return name[len(self.prefix) :] if self.prefix and name.startswith(self.prefix) else name

    def _stored(self, name: str) -> Stored:
        spelled = self._spelled(name)
        if spelled not in self._homes:
            raise DataError(f"{self.folder}: has no tensor {name!r}")
        return self._homes[spelled].stored[spelled]

    def _is_scale(self, name: str) -> bool:
        weight = name.removesuffix(SCALE)
        return weight != name and weight in self._homes

    def _block_size(self) -> tuple[int, int]:
        if not any(stored.dtype in _FP8 for file in self._files.values() for stored in file.stored.values()):
            return _BLOCK, _BLOCK
        path = self.folder / CONFIG
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        block = (config.get("quantization_config") or {}).get("weight_block_size") or (_BLOCK, _BLOCK)
        return int(block[0]), int(block[1])


def unused(files: HfFiles, sources: Iterable[str], ignored: Iterable[str]) -> list[str]:
    """Return the names of tensors that no row of a table reads, apart from patterns that are ignored."""
    read, patterns = set(sources), tuple(ignored)
    return sorted(
        name
        for name in files.names()
        if name not in read and not any(fnmatch(name, pattern) for pattern in patterns)
    )


def shown(names: Iterable[str]) -> str:
    """Return names for a message, the first few of many."""
    given = sorted(names)
    more = f" and {len(given) - _SHOWN} more" if len(given) > _SHOWN else ""
    return ", ".join(given[:_SHOWN]) + more


def _shards(folder: Path) -> tuple[list[Path], set[str]]:
    """Return the files of a model, and the names that its index lists where it has one."""
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder; check the path")
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index = folder / f"{stem}.{suffix}.index.json"
        if index.is_file():
            return _indexed(index)
        if (folder / f"{stem}.{suffix}").is_file():
            return [folder / f"{stem}.{suffix}"], set()
        found = sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
        if found:
            count = int(found[-1].stem.rpartition("-")[2])
            if len(found) != count:
                raise DataError(
                    f"{folder}: has {len(found)} of {count} shards {stem}-*.{suffix}; get the rest"
                )
            return found, set()
    raise DataError(f"{folder}: holds no weights (model.safetensors, pytorch_model.bin, or shards of them)")


def _indexed(index: Path) -> tuple[list[Path], set[str]]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = sorted({Path(file).name for file in names.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{index}: is no index of weights ({error}); copy it again") from error
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise DataError(f"{index}: names files that are not there: {shown(missing)}; copy them too")
    return [index.parent / name for name in files], set(names)
