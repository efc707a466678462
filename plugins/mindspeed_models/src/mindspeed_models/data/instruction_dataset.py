"""Instruction data in training: samples of their own lengths out of three parallel pairs of files."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset

from mindspeed_core.errors import DataError
from mindspeed_models.data.encoding import IGNORED
from mindspeed_models.data.settings import packed_prefixes

logger = logging.getLogger("mindspeed_core")

_KEPT_EPOCHS = 8
"""Orders that are remembered: a cyclic loader draws from all epochs."""


class InstructionFiles:
    """The pairs of files that a prefix stands for.

    Attributes:
        path_prefix: the prefix.
        ids: tokens of the samples.
        labels: their labels, -100 where a token is not trained.
    """

    def __init__(self, prefix: str) -> None:
        """Open the files.

        Raises:
            DataError: they do not belong together.
        """
        self.path_prefix = prefix
        self._prefixes = packed_prefixes(prefix)
        self.ids, self.labels, mask = (IndexedDataset(pair) for pair in self._prefixes)
        lengths = self.ids.sequence_lengths
        for pair, other in zip(self._prefixes[1:], (self.labels, mask)):
            if not np.array_equal(lengths, other.sequence_lengths):
                raise DataError(
                    f"{pair}: its samples have other lengths than those of {self._prefixes[0]}; make the "
                    "files again with mindspeed-models preprocess"
                )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.ids.sequence_lengths)


class InstructionDataset(MegatronDataset):
    """Samples of a split, shuffled anew in every epoch, or as they lie in the files.

    The order of an epoch follows from the seed and its number, on every rank by itself: no file is written
    and no rank waits.
    """

    keep_last_token = False
    shuffled = True

    def __init__(self, *given: Any) -> None:
        """Take megatron-core's arguments of a dataset."""
        super().__init__(*given)
        self._orders: dict[int, np.ndarray] = {}

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> InstructionFiles:
        """Open the files of a prefix, and tell how many samples will be cut."""
        files = InstructionFiles(dataset_path)
        _tell_cut(files, config.sequence_length)
        return files

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: InstructionFiles) -> int:
        """Return the number of samples, which ``--split`` divides."""
        return len(low_level_dataset)

    def __len__(self) -> int:
        """Return the number of samples that were asked for; of one epoch where none was."""
        return len(self.indices) if self.num_samples is None else int(self.num_samples)

    def places(self, index: Any) -> Any:
        """Return the place in the files of samples: an int of an int, an array of an array."""
        count = len(self.indices)
        if isinstance(index, int):
            return int(self.indices[self._order(int(index) // count)[int(index) % count]])
        index = np.asarray(index)
        found = np.empty(len(index), dtype=np.int64)
        epochs = index // count
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = self.indices[self._order(int(epoch))[index[here] % count]]
        return found

    def lengths(self, index: np.ndarray) -> np.ndarray:
        """Return how many tokens each sample has in training, ``[n]`` int64."""
        stored = self.dataset.ids.sequence_lengths[self.places(index)].astype(np.int64)
        return np.minimum(stored - (not self.keep_last_token), self.config.sequence_length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return ``tokens`` and ``labels`` ``[n]`` int64, and ``loss_mask`` ``[n]`` float32.

        Raises:
            DataError: a label is no id of the vocabulary.
        """
        place = self.places(int(index))
        ids, labels = (
            torch.from_numpy(np.asarray(part[place]).astype(np.int64))
            for part in (self.dataset.ids, self.dataset.labels)
        )
        if not self.keep_last_token:
            ids, labels = ids[:-1], labels[1:]
        longest = self.config.sequence_length
        ids, labels = ids[:longest], labels[:longest]
        trained = labels != IGNORED
        # The cross entropy over a split vocabulary takes an index beyond it for another rank's.
        labels = labels.masked_fill(~trained, 0)
        self._check(place, ids, labels)
        return {"tokens": ids, "labels": labels, "loss_mask": trained.float()}

    def _check(self, place: int, ids: torch.Tensor, labels: torch.Tensor) -> None:
        size = self.config.tokenizer.vocab_size
        for name, values in (("token", ids), ("label", labels)):
            if len(values) and not 0 <= int(values.min()) <= int(values.max()) < size:
                wrong = int(values.max()) if int(values.max()) >= size else int(values.min())
                raise DataError(
                    f"{self.dataset.path_prefix}: sample {place} has the {name} {wrong}, the tokenizer "
                    f"has {size} ids; name the tokenizer the data was made with in --tokenizer-model"
                )

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffled:
            return np.arange(len(self.indices))
        found = self._orders.get(epoch)
        if found is None:
            generator = np.random.RandomState((self.config.random_seed + epoch) % 2**32)
            if len(self._orders) == _KEPT_EPOCHS:
                self._orders.pop(next(iter(self._orders)))
            found = self._orders[epoch] = generator.permutation(len(self.indices))
        return found


class AlignedInstructionDataset(InstructionDataset):
    """Samples whose labels stand at the tokens that they are predicted from (``--keep-last-token``)."""

    keep_last_token = True


def in_file_order(kind: type[InstructionDataset]) -> type[InstructionDataset]:
    """Return the kind of dataset whose samples come as they lie in the files (``--no-shuffle``)."""
    return type(f"Ordered{kind.__name__}", (kind,), {"shuffled": False})


def _tell_cut(files: InstructionFiles, longest: int) -> None:
    """Warn of samples that are longer than a row, whose answers are cut.

    Raises:
        DataError: all are.
    """
    # A sample loses a token where labels are shifted.
    count = int((files.ids.sequence_lengths > longest + 1).sum())
    if not count:
        return
    remedy = "raise --seq-length, or prepare the data with --seq-length and --overlong"
    if count == len(files):
        raise DataError(
            f"{files.path_prefix}: all {count} samples are longer than --seq-length {longest}, and lose the "
            f"end of their answers; {remedy}"
        )
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "%s: %d of %d samples are longer than --seq-length %d and lose the end of their answers; %s",
            files.path_prefix,
            count,
            len(files),
            longest,
            remedy,
        )


def sample_lengths(dataset: Any, index: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return how many tokens samples of a dataset or of a blend have, ``[n]`` int64."""
    index = np.asarray(index, dtype=np.int64)
    if not isinstance(dataset, BlendedDataset):
        found: np.ndarray = dataset.lengths(index)
        return found
    found = np.empty(len(index), dtype=np.int64)
    which, places = dataset.dataset_index[index], dataset.dataset_sample_index[index]
    for number, each in enumerate(dataset.datasets):
        here = which == number
        if here.any():
            found[here] = each.lengths(places[here])
    return found
