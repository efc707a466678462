"""Blocks of megatron-core's global tensors, read from Hugging Face's files through a weight table.

Conversion asks for chunks and live loading for a rank's share; both get exactly the bytes they need. Nothing
is read before names and shapes were compared with the table, in both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mindspeed_core.errors import DataError
from mindspeed_models.recipe import ModelPlan, Recipe
from mindspeed_models.weights.hf_files import HfFiles, shown, unused
from mindspeed_models.weights.table import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY = (EMBEDDING, HEAD)
"""Keys of the tensors with a row for each token."""
_TIED = "lm_head.weight"
_COMPARED_BYTES = 32 << 20


class GlobalTensors(Protocol):
    """Something that gives megatron-core's global tensors by their keys.

    Attributes:
        keys: of all tensors.
    """

    keys: tuple[str, ...]

    def __contains__(self, key: str) -> bool:
        """Return whether the model has a tensor with this key."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape."""

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block."""


class TableReader:
    """The model in Hugging Face's files, as megatron-core's global tensors.

    Attributes:
        files: the files.
        plan: the model that is read.
        keys: the keys of all tensors, in the order of the table.
        left: names in the files that another plan than the files' own does not read.
    """

    def __init__(
        self, files: HfFiles, recipe: Recipe, plan: ModelPlan, own: ModelPlan, *, added_tokens: int = 0
    ) -> None:
        """Compare names and shapes.

        Args:
            files: the files.
            recipe: the family.
            plan: the model that is wanted.
            own: the model that ``config.json`` beside the files describes; with ``--override-model-config``
                it may be another one.
            added_tokens: further rows of the vocabulary, which get the mean of all others.

        Raises:
            DataError: a tensor is missing, unused, or has the shape of another model; all are named.
        """
        self.files, self.plan, self._added = files, plan, added_tokens
        self._entries: dict[str, list[Entry]] = {}
        self._means: dict[str, torch.Tensor] = {}
        for entry in recipe.entries(plan).values():
            self._entries.setdefault(entry.key, []).append(entry)
        self._also = {name: key for key, entries in self._entries.items() for name in entries[0].also}
        self.keys = tuple(self._entries)
        self._check_names(recipe, own)
        for key in self.keys:
            self._check_shape(key)

    def __contains__(self, key: str) -> bool:
        """Return whether the model has a tensor with this key, or it is another name of one."""
        return self._also.get(key, key) in self._entries

    def also(self, key: str) -> tuple[str, ...]:
        """Return further keys of a tensor."""
        return self._entries[key][0].also

    def has_experts(self, key: str) -> bool:
        """Return whether a tensor's first dimension counts experts."""
        return self._entries[key][0].expert is not None

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape of a tensor; experts come first where it has them."""
        entries = self._entries[self._also.get(key, key)]
        inner = self._inner(entries[0])
        if key in VOCABULARY:
            inner = (inner[0] + self._added, *inner[1:])
        return inner if entries[0].expert is None else (len(entries), *inner)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of the files."""
        return self.files.dtype(self._entries[self._also.get(key, key)][0].sources[0])

    def read(self, key: str, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """Read a block of a global tensor, in the dtype of the files.

        Args:
            key: the key, or another name of the tensor.
            offset: first index in each dimension.
            shape: size in each dimension. Rows behind a vocabulary's last are zeros.
        """
        key = self._also.get(key, key)
        entries = self._entries[key]
        if entries[0].expert is None:
            return self._block(key, entries[0], offset, shape)
        chosen = entries[offset[0] : offset[0] + shape[0]]
        return torch.stack([self._block(key, entry, offset[1:], shape[1:]) for entry in chosen])

    def check_repeats(self) -> None:
        """Compare tensors that the files hold more than once, which the model has once.

        Raises:
            DataError: they differ; names both.
        """
        for name, repeat in self._repeats():
            if not _equal(self.files, name, repeat):
                raise DataError(
                    f"{self.files.folder}: {repeat!r} differs from {name!r}, which the model uses in its "
                    "place; "
                    "with an output layer of its own a model has tie_word_embeddings false in config.json"
                )

    def _repeats(self) -> Iterator[tuple[str, str]]:
        for entries in self._entries.values():
            for entry in entries:
                yield from ((entry.sources[0], each) for each in entry.repeats if each in self.files)
        if self.plan.tied and _TIED in self.files:
            yield self._entries[EMBEDDING][0].sources[0], _TIED

    def _check_names(self, recipe: Recipe, own: ModelPlan) -> None:
        wanted = {name for entries in self._entries.values() for each in entries for name in each.sources}
        repeats = {name for entries in self._entries.values() for each in entries for name in each.repeats}
        missing = [name for name in wanted if name not in self.files]
        ignored = (*recipe.ignored, _TIED) if self.plan.tied else recipe.ignored
        extra = unused(self.files, wanted | repeats, ignored)
        known = set() if own.arguments == self.plan.arguments else _sources(recipe.entries(own).values())
        self.left = [name for name in extra if name in known]
        extra = [name for name in extra if name not in known]
        problems = []
        if missing:
            problems.append(f"{len(missing)} tensors are missing: {shown(missing)}")
        if extra:
            problems.append(f"{len(extra)} tensors belong to no part of the model: {shown(extra)}")
        if problems:
            raise DataError(
                f"{self.files.folder}: is not a model of the family {recipe.name} as its config.json "
                "describes it; " + "; ".join(problems)
            )

    def _check_shape(self, key: str) -> None:
        for entry in self._entries[key]:
            shapes = [self.files.shape(name) for name in entry.sources]
            rows = entry.shape(shapes)[0]
            expected = entry.source_shapes(entry.shape(shapes), self.plan)
            for name, shape, wanted in zip(entry.sources, shapes, expected):
                if shape != wanted:
                    raise DataError(
                        f"{self.files.folder}: tensor {name!r} has shape {list(shape)}, the model of "
                        "config.json "
                        f"needs {list(wanted)}"
                    )
            if key in VOCABULARY and rows < self.plan.vocabulary:
                raise DataError(
                    f"{self.files.folder}: tensor {entry.sources[0]!r} has {rows} rows, vocab_size in "
                    "config.json "
                    f"is {self.plan.vocabulary}"
                )

    def _inner(self, entry: Entry) -> tuple[int, ...]:
        return entry.shape([self.files.shape(name) for name in entry.sources])

    def _block(self, key: str, entry: Entry, offset: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        total = self._inner(entry)
        columns = (offset[1], offset[1] + shape[1]) if len(shape) > 1 else None
        first, last = (offset[0], offset[0] + shape[0]) if shape else (0, 1)
        if not shape:
            return self.files.read(entry.sources[0])
        parts = [
            self.files.read(entry.sources[each.source], (each.start, each.stop), columns)
            for each in entry.rows(first, last, total[0], self.plan)
        ]
        if last > total[0]:
            parts.append(self._beyond(key, entry, (max(first, total[0]), last), total, columns))
        return torch.cat(parts) if len(parts) != 1 else parts[0]

    def _beyond(
        self,
        key: str,
        entry: Entry,
        rows: tuple[int, int],
        total: Sequence[int],
        columns: tuple[int, int] | None,
    ) -> torch.Tensor:
        """Return rows of a vocabulary that the files do not have: of added tokens, then padding."""
        wide = total[1:] if columns is None else (columns[1] - columns[0], *total[2:])
        found = torch.zeros((rows[1] - rows[0], *wide), dtype=self.files.dtype(entry.sources[0]))
        added = min(rows[1], total[0] + self._added) - rows[0]
        if added > 0:
            mean = self._mean(key, entry.sources[0])
            found[:added] = mean if columns is None else mean[columns[0] : columns[1]]
        return found

    def _mean(self, key: str, name: str) -> torch.Tensor:
        if key not in self._means:
            rows = self.files.shape(name)[0]
            total = torch.zeros(self.files.shape(name)[1:], dtype=torch.float64)
            for start, stop in _ranges(self.files, name):
                total += self.files.read(name, (start, stop)).double().sum(0)
            self._means[key] = (total / rows).to(self.files.dtype(name))
        return self._means[key]


def _sources(entries: Iterable[Entry]) -> set[str]:
    return {name for entry in entries for name in (*entry.sources, *entry.repeats)}


def _ranges(files: HfFiles, name: str) -> Iterator[tuple[int, int]]:
    shape = files.shape(name)
    row = files.dtype(name).itemsize * max(1, torch.Size(shape[1:]).numel())
    step = max(1, _COMPARED_BYTES // row)
    for start in range(0, shape[0], step):
        yield start, min(shape[0], start + step)


def _equal(files: HfFiles, name: str, other: str) -> bool:
    return files.shape(name) == files.shape(other) and all(
        torch.equal(files.read(name, rows), files.read(other, rows)) for rows in _ranges(files, name)
    )
