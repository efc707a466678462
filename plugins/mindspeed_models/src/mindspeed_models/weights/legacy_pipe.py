"""Bloom in the older layout: modules of a DeepSpeed pipeline, numbered through, a file for each rank.

Layer ``l`` of the model is module ``l + 3``, behind the embedding, and the last norm is two modules behind
the last layer. Tensor-parallel ranks of a stage come one after the other, the stages behind each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import DataError
from mindspeed_models.recipe import ModelPlan
from mindspeed_models.weights.hf_files import shown
from mindspeed_models.weights.legacy import LAYER_NAMES, RELEASE, LegacyLayout, part_of
from mindspeed_models.weights.reader import EMBEDDING, GlobalTensors
from mindspeed_train.interface import FilePart, read_archive

_RANK = re.compile(r"mp_rank_(\d{2,})_model_states\.pt")
_TIED = "tied_modules.embed.word_embeddings."
_FIRST = {
    EMBEDDING: (_TIED + "weight", 0),
    "embedding.norm.weight": (_TIED + "norm.weight", None),
    "embedding.norm.bias": (_TIED + "norm.bias", None),
}
_BEFORE, _BEHIND = 3, 4
"""Modules before the first layer, and the number of the last norm beyond that of layers."""


def is_piped(plan: ModelPlan) -> bool:
    """Return whether the older layout of a model is a pipeline of modules: that of Bloom."""
    return bool(plan.value("embed_layernorm", False))


def piped_names(plan: ModelPlan) -> dict[str, tuple[str, int | None]]:
    """Return name and shared axis of every tensor, by key in megatron-core, in the order of the model."""
    found = dict(_FIRST)
    for layer in range(plan.layers):
        for suffix, (name, axis) in LAYER_NAMES.items():
            found[f"decoder.layers.{layer}.{suffix}"] = (f"{layer + _BEFORE}.{name}", axis)
    for kind in ("weight", "bias"):
        key = f"decoder.final_layernorm.{kind}"
        found[key] = (f"{plan.layers + _BEHIND}.final_layernorm.{kind}", None)
    return found


def rank_file(layout: LegacyLayout, tensor: int, pipeline: int) -> str:
    """Return the name of one rank's file."""
    return f"mp_rank_{pipeline * layout.tensor + tensor:02d}_model_states.pt"


def rank_state(
    reader: GlobalTensors, plan: ModelPlan, layout: LegacyLayout, tensor: int, pipeline: int
) -> dict[str, Any]:
    """Return what one rank's file holds."""
    stages = layout.stages(plan)
    first = sum(stages[:pipeline])
    own = range(first, first + stages[pipeline])
    model: dict[str, torch.Tensor] = {}
    for key, (name, axis) in piped_names(plan).items():
        layer = int(key.split(".")[2]) if key.startswith("decoder.layers.") else None
        stage = 0 if key in _FIRST else layout.pipeline - 1
        if layer in own if layer is not None else stage == pipeline:
            model[name] = part_of(reader, layout, tensor, key, axis)
    return {"checkpoint_version": 3.0, "module": {"module": model}, "dp_world_size": 0}


class PipedFiles:
    """Bloom in older files as megatron-core's global tensors.

    Attributes:
        path: the folder of the files.
        hf: a folder with ``config.json`` beside them; it need not exist.
        layout: sizes of the files.
    """

    def __init__(self, folder: Path, plan: ModelPlan) -> None:
        """Read the files of all ranks.

        Args:
            folder: the files, or the folder that holds ``release`` with them.
            plan: the model.

        Raises:
            DataError: a rank is missing, a file is damaged, or it holds another model.
        """
        self.path = folder / RELEASE if (folder / RELEASE).is_dir() else folder
        self.hf = self.path / "hf"
        self._names = piped_names(plan)
        ranks = _ranks(self.path)
        found = [_flat(ranks[rank]) for rank in sorted(ranks)]
        tensor = sum(_TIED + "weight" in model for model in found)
        if not tensor or len(found) % tensor:
            raise DataError(
                f"{self.path}: {tensor} of {len(found)} files hold an embedding; files are missing, or of "
                "several models"
            )
        self.layout = LegacyLayout(tensor, len(found) // tensor, deepspeed=True)
        self._parts: dict[str, list[torch.Tensor]] = {}
        for start in range(0, len(found), tensor):
            stage = found[start : start + tensor]
            for name in stage[0]:
                lacking = [start + rank for rank, model in enumerate(stage) if name not in model]
                if lacking:
                    raise DataError(f"{self.path}: the file of rank {lacking[0]} has no tensor {name!r}")
                self._parts[name] = [model[name] for model in stage]

    def __enter__(self) -> PipedFiles:
        """Use as a context manager."""
        return self

    def __exit__(self, *unused: Any) -> None:
        """Let the tensors go."""
        self._parts = {}

    def keys(self) -> set[str]:
        """Return the keys of all tensors that the files hold; names that mean nothing stay as they are."""
        known = {name: key for key, (name, _) in self._names.items()}
        return {known.get(name, name) for name in self._parts}

    def spelled(self, key: str, also: Sequence[str] = ()) -> str | None:
        """Return the key, or None where the files have no such tensor."""
        return key if self._names.get(key, ("", None))[0] in self._parts else None

    def shape(self, key: str, stored: str) -> tuple[int, ...]:
        """Return the global shape."""
        return tuple(self._whole(key).shape)

    def dtype(self, stored: str) -> torch.dtype:
        """Return the dtype."""
        return self._parts[self._names[stored][0]][0].dtype

    def read(self, key: str, stored: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block of a tensor."""
        block = tuple(slice(start, start + size) for start, size in zip(offset, shape))
        return self._whole(key)[block].clone()

    def _whole(self, key: str) -> torch.Tensor:
        name, axis = self._names[key]
        parts = self._parts[name]
        return parts[0] if axis is None else torch.cat(parts, axis)


def _ranks(folder: Path) -> dict[int, Path]:
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    found = {int(match[1]): path for path in paths if (match := _RANK.fullmatch(path.name))}
    if not found:
        raise DataError(
            f"{folder}: holds no ranks of Bloom's older layout (mp_rank_*_model_states.pt); check the path"
        )
    missing = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(max(found)) if rank not in found]
    if missing:
        raise DataError(f"{folder}: files are missing: {shown(missing)}; copy them too")
    return found


def _flat(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank by name."""
    with path.open("rb") as file:
        part = FilePart(file.fileno(), 0, path.stat().st_size)
        state = read_archive(part, str(path), trusted=True)
    return dict(_tensors(state, path))


def _tensors(state: Any, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    outer = state.get("module") if isinstance(state, dict) else None
    # DeepSpeed's own saves have one level less than converters wrote.
    inner = outer.get("module", outer) if isinstance(outer, dict) else None
    if not isinstance(inner, dict):
        raise DataError(f"{path}: holds no module; it is of another program or layout")
    for name, value in inner.items():
        if isinstance(value, torch.Tensor):
            yield str(name), value
