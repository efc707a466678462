"""Several samples a row: which ones fit, and the row they make.

Samples are packed where they are drawn, window by window, so that files stay as they are and a resumed run
packs the same rows. Best fit: the longest sample first, each into the fullest row that has room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from mindspeed_core.run import Sampling
from mindspeed_models.data.instruction_dataset import sample_lengths

WINDOW = 8192
"""Samples that are packed at a time."""


def best_fit(lengths: Sequence[int] | np.ndarray, room: int) -> list[list[int]]:
    """Pack items of given lengths into rows.

    Args:
        lengths: of the items, each from 0 to ``room``.
        room: of a row.

    Returns:
        The items of each row, in the order in which they were put there: every item once.
    """
    order = sorted(range(len(lengths)), key=lambda item: -int(lengths[item]))
    rows: list[list[int]] = []
    # Ascending pairs of room that is left and number of the row.
    left: list[tuple[int, int]] = []
    for item in order:
        length = int(lengths[item])
        at = bisect_left(left, (length, -1))
        if at == len(left):
            rows.append([])
            found, row = room, len(rows) - 1
        else:
            found, row = left.pop(at)
        rows[row].append(item)
        # A full row still takes samples without a token.
        insort(left, (found - length, row))
    return rows


def packed_rows(sampling: Sampling, room: int, *, shuffled: bool) -> Iterator[tuple[int, ...]]:
    """Yield rows of keys of a dataset, without end.

    Args:
        sampling: the dataset, and the seed.
        room: tokens of a row.
        shuffled: deal out the rows of a window in an order that does not go with their lengths.
    """
    count, epoch = len(sampling.dataset), sampling.dataset.epoch
    start = window = 0
    while True:
        # No row holds a sample of one epoch and one of the next, which may be the same.
        end = min(start + WINDOW, count, (start // epoch + 1) * epoch)
        keys = np.arange(start, end)
        rows = best_fit(sample_lengths(sampling.dataset, keys), room)
        if shuffled:
            np.random.RandomState((sampling.seed + window) % 2**32).shuffle(rows)
        for row in rows:
            yield tuple(int(keys[item]) for item in sorted(row))
        start, window = end % count, window + 1


def packed_batches(
    sampling: Sampling, room: int, *, shuffled: bool = True
) -> Iterator[list[tuple[int, ...]]]:
    """Yield this rank's micro-batches of packed rows; those of validation and test in order."""
    rows = packed_rows(sampling, room, shuffled=shuffled and sampling.split == "train")

    def batches() -> Iterator[list[Any]]:
        while True:
            yield [next(rows) for _ in range(sampling.micro_batch_size)]

    return sampling.share(batches())


class PackedSamples:
    """Rows of several samples of a dataset, by the keys of these."""

    def __init__(self, samples: Any) -> None:
        """Pack the samples of a dataset."""
        self.samples = samples

    def __len__(self) -> int:
        """Return the number of samples, not of rows."""
        return len(self.samples)

    @property
    def epoch(self) -> int:
        """Return after how many samples they come again; the samples of a blend have no such number."""
        return len(getattr(self.samples, "indices", self.samples))

    def lengths(self, index: np.ndarray) -> np.ndarray:
        """Return how many tokens samples have."""
        return sample_lengths(self.samples, index)

    def __getitem__(self, keys: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Return the row of these samples, with ``position_ids`` that begin again at each."""
        parts = [self.samples[key] for key in keys]
        row = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        row["position_ids"] = torch.cat([torch.arange(len(part["tokens"])) for part in parts])
        return row
