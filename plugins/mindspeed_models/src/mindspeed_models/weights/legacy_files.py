"""Reading of AscendSpeed's older layout as global tensors of megatron-core; nothing in the files runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from mindspeed_core.errors import DataError
from mindspeed_models.recipe import ModelPlan, Recipe
from mindspeed_models.weights.hf_files import shown
from mindspeed_models.weights.legacy import (
    FC1,
    FILE,
    GATE,
    LAYER_NAMES,
    MERGED,
    RELEASE,
    UP,
    LegacyLayout,
)
from mindspeed_models.weights.legacy_pipe import PipedFiles, is_piped
from mindspeed_models.weights.reader import EMBEDDING, HEAD, VOCABULARY
from mindspeed_train.interface import FilePart, read_archive

_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")


def open_older(folder: Path, plan: ModelPlan, *, seed_gqa_order: bool = False) -> LegacyFiles | PipedFiles:
    """Read the files of all ranks, in the layout that the model's family has.

    Args:
        folder: the ranks, or the folder that holds ``release`` with them.
        plan: the model.
        seed_gqa_order: query heads of a group are strided, as older converters left them.

    Raises:
        DataError: a rank is missing, a file is damaged, or it holds another model.
    """
    if is_piped(plan):
        return PipedFiles(folder, plan)
    return LegacyFiles(folder, plan, seed_gqa_order=seed_gqa_order)


class LegacyFiles:
    """A model in the older layout as megatron-core's global tensors.

    Attributes:
        path: the folder of the ranks.
        hf: a folder with ``config.json`` beside them; it need not exist.
    """

    def __init__(self, folder: Path, plan: ModelPlan, *, seed_gqa_order: bool = False) -> None:
        """Read the files of all ranks.

        Args:
            folder: the ranks' folders, or the one that holds ``release`` with them.
            plan: the model.
            seed_gqa_order: query heads of a group are strided, as older converters left them.

        Raises:
            DataError: a rank is missing, a file is damaged, or it holds another model.
        """
        self.path = folder / RELEASE if (folder / RELEASE).is_dir() else folder
        self.hf = self.path / "hf"
        self._plan, self._seed_order = plan, seed_gqa_order
        ranks = _ranks(self.path)
        self._tensor = 1 + max(tensor for tensor, _ in ranks)
        self._pipeline = 1 + max(pipeline for _, pipeline in ranks)
        LegacyLayout(self._tensor, self._pipeline).check(plan)
        self._ranks = {place: _flat(path) for place, path in ranks.items()}
        self.layout = LegacyLayout(self._tensor, self._pipeline)

    def __enter__(self) -> LegacyFiles:
        """Use as a context manager."""
        return self

    def __exit__(self, *unused: Any) -> None:
        """Let the tensors go."""
        self._ranks = {}

    def keys(self) -> set[str]:
        """Return the keys of all tensors that the files hold."""
        known = {name: key for key, (name, _) in LAYER_NAMES.items()}
        known |= {GATE: FC1, MERGED: FC1}
        found: set[str] = set()
        for (_, pipeline), model in self._ranks.items():
            for name in model:
                found.update(self._key(name, pipeline, known))
        return found

    def spelled(self, key: str, also: Sequence[str] = ()) -> str | None:
        """Return the key, or None where the files have no such tensor."""
        return key if key in self.keys() else None

    def shape(self, key: str, stored: str) -> tuple[int, ...]:
        """Return the global shape."""
        return tuple(self._whole(key).shape)

    def dtype(self, stored: str) -> torch.dtype:
        """Return the dtype."""
        return self._whole(stored).dtype

    def read(self, key: str, stored: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block of a tensor."""
        block = tuple(slice(start, start + size) for start, size in zip(offset, shape))
        return self._whole(key)[block].clone()

    def _key(self, name: str, pipeline: int, renamed: dict[str, str]) -> Iterator[str]:
        match = re.match(r"encoder\.layers\.(\d+)\.(.+)", name)
        if match and match[2] in renamed:
            layer = pipeline * (self._plan.layers // self._pipeline) + int(match[1])
            yield f"decoder.layers.{layer}.{renamed[match[2]]}"
        elif name == "embedding.word_embeddings.weight":
            yield EMBEDDING
        elif name == "output_layer.weight":
            yield HEAD
        elif name.startswith("encoder.final_layernorm."):
            yield "decoder." + name.removeprefix("encoder.")
        elif not name.endswith("rotary_emb.inv_freq"):
            yield name

    def _parts(self, pipeline: int, name: str) -> list[torch.Tensor]:
        models = [self._ranks[tensor, pipeline] for tensor in range(self._tensor)]
        missing = [rank for rank, model in enumerate(models) if name not in model]
        if missing:
            raise DataError(f"{self.path}: rank {missing[0]} of stage {pipeline} has no tensor {name!r}")
        return [model[name] for model in models]

    def _whole(self, key: str) -> torch.Tensor:
        if key in VOCABULARY:
            stage = 0 if key == EMBEDDING else self._pipeline - 1
            return torch.cat(self._parts(stage, key))
        if key.startswith("decoder.final_layernorm."):
            return self._parts(self._pipeline - 1, "encoder." + key.removeprefix("decoder."))[0]
        _, _, number, suffix = key.split(".", 3)
        stage, inside = divmod(int(number), self._plan.layers // self._pipeline)
        name, axis = LAYER_NAMES[suffix]
        prefix = f"encoder.layers.{inside}."
        if suffix == FC1 and self._plan.value("swiglu", False):
            return self._gated(stage, prefix)
        parts = self._parts(stage, prefix + name)
        if axis is None:
            return parts[0]
        if self._seed_order and "query_key_value" in name:
            parts = [self._ordered(part) for part in parts]
        return torch.cat(parts, axis)

    def _gated(self, stage: int, prefix: str) -> torch.Tensor:
        if prefix + MERGED in self._ranks[0, stage]:
            halves = [part.chunk(2) for part in self._parts(stage, prefix + MERGED)]
            return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
        return torch.cat([*self._parts(stage, prefix + GATE), *self._parts(stage, prefix + UP)])

    def _ordered(self, part: torch.Tensor) -> torch.Tensor:
        """Give a rank's groups consecutive query heads: older converters gave group j the heads j, j+g, …."""
        groups = self._plan.groups // self._tensor
        heads, size = self._plan.heads // self._plan.groups, self._plan.head_dim
        blocks = part.reshape(groups, heads + 2, size, *part.shape[1:]).clone()
        queries = blocks[:, :heads].transpose(0, 1).reshape(groups, heads, size, *part.shape[1:])
        # Where both counts are equal it is a view of what is written now.
        blocks[:, :heads] = queries.clone()
        return blocks.reshape(part.shape)


class LegacyReader:
    """Global tensors of older files, in the way in which `TableReader` gives those of Hugging Face.

    Attributes:
        plan: the model.
        keys: the keys of all tensors.
    """

    def __init__(self, files: LegacyFiles | PipedFiles, recipe: Recipe, plan: ModelPlan) -> None:
        """Compare keys with the table.

        Raises:
            DataError: tensors are missing, or belong to no part of the model; all are named.
        """
        self.plan, self._files = plan, files
        self.keys = tuple(dict.fromkeys(key for key, _ in recipe.entries(plan)))
        held = files.keys()
        if plan.tied:
            held.discard(HEAD)
        missing, extra = set(self.keys) - held, held - set(self.keys)
        if missing or extra:
            parts = [f"missing: {shown(missing)}"] if missing else []
            parts += [f"of no part of the model: {shown(extra)}"] if extra else []
            raise DataError(f"{files.path}: is no model of the family {recipe.name}; {'; '.join(parts)}")

    def __contains__(self, key: str) -> bool:
        """Return whether the model has a tensor with this key."""
        return key in self.keys

    def also(self, key: str) -> tuple[str, ...]:
        """Return further keys of a tensor: none."""
        return ()

    def has_experts(self, key: str) -> bool:
        """Return whether a tensor's first dimension counts experts: none does."""
        return False

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape, without the padding of the vocabulary."""
        found = self._files.shape(key, key)
        return (min(found[0], self.plan.vocabulary), *found[1:]) if key in VOCABULARY else found

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype."""
        return self._files.dtype(key)

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block; rows behind the vocabulary's last are zeros."""
        found = self._files.read(key, key, offset, shape)
        if key not in VOCABULARY:
            return found
        result = torch.zeros(tuple(shape), dtype=found.dtype)
        rows = max(0, min(len(found), self.shape(key)[0] - offset[0]))
        result[:rows] = found[:rows]
        return result


def _ranks(folder: Path) -> dict[tuple[int, int], Path]:
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.glob("mp_rank_*")) if folder.is_dir() else ():
        match = _RANK.fullmatch(path.name)
        if match and (path / FILE).is_file():
            found[int(match[1]), int(match[2] or 0)] = path / FILE
        elif path.name.endswith("_model_states.pt"):
            found[int(path.name.split("_")[2]), 0] = path
    if not found:
        raise DataError(f"{folder}: holds no ranks of the older layout (mp_rank_*/{FILE}); check the path")
    sizes = [1 + max(place[axis] for place in found) for axis in (0, 1)]
    missing = [(t, p) for t in range(sizes[0]) for p in range(sizes[1]) if (t, p) not in found]
    if missing:
        names = [f"mp_rank_{t:02d}_{p:03d}" for t, p in missing]
        raise DataError(f"{folder}: ranks are missing: {shown(names)}; copy them too")
    return found


def ffn_of(folder: Path) -> int:
    """Return the intermediate size of a model in the older layout, from its first rank's tensors."""
    path = folder / RELEASE if (folder / RELEASE).is_dir() else folder
    ranks = _ranks(path)
    model = _flat(ranks[0, 0])
    tensors = 1 + max(tensor for tensor, _ in ranks)
    for name, share in ((UP, 1), (MERGED, 2)):
        found = model.get(f"encoder.layers.0.{name}")
        if found is not None:
            return len(found) * tensors // share
    raise DataError(f"{path}: the first layer has no MLP; it is of another program or layout")


def _flat(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank by name, without what is not of the model."""
    with path.open("rb") as file:
        part = FilePart(file.fileno(), 0, path.stat().st_size)
        state = read_archive(part, str(path), trusted=True)
    model = state.get("model", state.get("module")) if isinstance(state, dict) else None
    language = model.get("language_model") if isinstance(model, dict) else None
    if not isinstance(language, dict):
        raise DataError(f"{path}: holds no language_model; it is of another program or layout")
    found: dict[str, torch.Tensor] = {}

    def collect(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                found[prefix + name] = value
            elif isinstance(value, dict):
                collect(f"{prefix}{name}.", value)

    collect("", language)
    return found
