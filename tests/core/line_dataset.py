"""Samples of a file with a list of token numbers on each line."""

import json
from pathlib import Path

import torch


class LineDataset(torch.utils.data.Dataset):
    def __init__(self, path, length, in_order):
        self.lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        self.length, self.in_order, self.asked = length, in_order, 0

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        if self.in_order:
            index, self.asked = self.asked, self.asked + 1
        tokens = torch.tensor(self.lines[index % len(self.lines)])
        return {
            "tokens": tokens[: self.length],
            "labels": tokens[1 : self.length + 1],
            "loss_mask": torch.ones(self.length),
            "position_ids": torch.arange(self.length),
        }
