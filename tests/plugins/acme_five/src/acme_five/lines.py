"""A file with a list of token numbers on each line, read in an order from short to long."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch

from mindspeed_core.run import Datasets, Sampling


class LineDataset:
    """Sample ``i`` is line ``i``: ``[n]`` int64."""

    def __init__(self, path: str) -> None:
        """Read the whole file."""
        self.lines: list[list[int]] = [json.loads(line) for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self.lines)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a line."""
        return torch.tensor(self.lines[index])


def datasets(path: str, seq_length: int) -> Datasets:
    """Return training data alone."""
    return Datasets(
        LineDataset(path), collate=partial(filled_up, seq_length=seq_length), batch_sampler=short_first
    )


def short_first(sampling: Sampling) -> Iterator[list[int]]:
    """Yield this rank's micro-batches; each pass over the file goes from short lines to long ones."""
    lines = sampling.dataset.lines
    order = cycle(sorted(range(len(lines)), key=lambda index: len(lines[index])))
    return sampling.share(iter(lambda: list(islice(order, sampling.micro_batch_size)), []))


def filled_up(lines: list[torch.Tensor], seq_length: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch, each field ``[b, s]``; what a line does not fill counts in no loss."""
    whole = torch.zeros(len(lines), seq_length + 1, dtype=torch.int64)
    for row, line in zip(whole, lines):
        row[: len(line)] = line[: seq_length + 1]
    positions = torch.arange(seq_length).expand(len(lines), -1).contiguous()
    lengths = torch.tensor([len(line) - 1 for line in lines])
    return {
        "tokens": whole[:, :-1].contiguous(),
        "labels": whole[:, 1:].contiguous(),
        "loss_mask": (positions < lengths[:, None]).float(),
        "position_ids": positions,
    }
