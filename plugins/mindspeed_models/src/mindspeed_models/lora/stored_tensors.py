"""Whole tensors of a distributed checkpoint, one at a time, in one process.

Layers that a checkpoint holds in one tensor with a leading axis are read layer by layer, under the keys that
they would have alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import CheckpointError
from mindspeed_models.weights.mcore_files import McoreFiles
from mindspeed_train.interface import CheckpointIndex, publish, read_common, read_index

_LAYERS = "decoder.layers."
_NUMBERED = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class StoredTensors:
    """The weights in one checkpoint.

    Attributes:
        path: of the checkpoint.
        index: of its tensors.
        common: its common state.
        manifest: of a checkpoint that was published here; None for one of another program.
    """

    path: Path
    index: CheckpointIndex
    common: Mapping[str, Any]
    manifest: Any = None

    @classmethod
    def find(cls, folder: Path, step: int | None = None) -> StoredTensors:
        """Open the latest checkpoint of a folder, or that of a step.

        Raises:
            CheckpointError: there is none, or its files are damaged.
        """
        found = publish.find(folder, step, accept_unpublished=True)
        if found is None:
            raise CheckpointError(f"{folder}: holds no checkpoint")
        if found.manifest is not None:
            for problem in publish.check_files(
                found.path, found.manifest, found.manifest.files, contents=True
            ):
                raise CheckpointError(problem)
        return cls(found.path, read_index(found.path), read_common(found.path), found.manifest)

    def stored_keys(self) -> list[str]:
        """Return the keys of the model's tensors, as the file has them."""
        return sorted(McoreFiles.of(self.path, self.index).keys())

    def layer_keys(self) -> Iterator[str]:
        """Yield the keys of the model's tensors, each layer's apart."""
        for key in self.stored_keys():
            rest = key.removeprefix(_LAYERS)
            if rest == key or _NUMBERED.match(key):
                yield key
            else:
                layers = self.index.tensors[key].shape[0]
                yield from (f"{_LAYERS}{layer}.{rest}" for layer in range(layers))

    def read(self, key: str) -> torch.Tensor:
        """Read a tensor by a key of `layer_keys`.

        Raises:
            CheckpointError: there is none with that key.
        """
        with McoreFiles.of(self.path, self.index) as files:
            stored = files.spelled(key)
            if stored is None:
                raise CheckpointError(f"{self.path}: holds no tensor {key!r}")
            shape = files.shape(key, stored)
            return files.read(key, stored, [0] * len(shape), shape)
