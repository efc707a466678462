"""Micro-batches of samples of different lengths: filled up on the right, with a mask of what fills up."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

MULTIPLE = 32
"""Lengths are multiples of this, as in AscendSpeed: kernels are tuned for few shapes."""


@dataclass(frozen=True)
class Lengths:
    """The length that a micro-batch is filled up to.

    Attributes:
        longest: ``--seq-length``; what every micro-batch has where it is fixed.
        fixed: all have it.
        multiple: others have a multiple of this.
        buckets: or the smallest of these that holds them, ascending.
    """

    longest: int
    fixed: bool = True
    multiple: int = MULTIPLE
    buckets: tuple[int, ...] = ()

    def of(self, length: int) -> int:
        """Return the length of a micro-batch whose longest sample has ``length`` tokens."""
        if self.fixed:
            return self.longest
        length = max(length, 1)
        if self.buckets:
            return next((bucket for bucket in self.buckets if bucket >= length), self.longest)
        return min(-(-length // self.multiple) * self.multiple, self.longest)


def lengths_of(args: Namespace) -> Lengths:
    """Return the lengths that the flags ask for."""
    ranks = args.tensor_model_parallel_size if getattr(args, "sequence_parallel", False) else 1
    return Lengths(
        args.seq_length,
        not args.variable_seq_lengths,
        math.lcm(MULTIPLE, ranks),
        tuple(sorted(args.seq_length_buckets or ())),
    )


@dataclass(frozen=True)
class Collate:
    """Makes a micro-batch of samples.

    Attributes:
        lengths: how far it is filled up.
        padding: the token that fills up; it is in the vocabulary, and nothing is computed from it.
    """

    lengths: Lengths
    padding: int = 0

    def __call__(self, samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return tensors ``[b, s]``: tokens, labels, loss_mask, position_ids and padding_mask.

        Positions of a sample go on where it is filled up, but begin again behind packed samples, so that
        what fills up is no part of the last of them.
        """
        length = self.lengths.of(max(len(sample["tokens"]) for sample in samples))
        shape = (len(samples), length)
        batch = {
            "tokens": torch.full(shape, self.padding, dtype=torch.int64),
            "labels": torch.zeros(shape, dtype=torch.int64),
            "loss_mask": torch.zeros(shape, dtype=torch.float32),
            "position_ids": torch.arange(length).repeat(len(samples), 1),
            "padding_mask": torch.ones(shape, dtype=torch.bool),
        }
        for row, sample in enumerate(samples):
            count = len(sample["tokens"])
            for name in ("tokens", "labels", "loss_mask"):
                batch[name][row, :count] = sample[name]
            batch["padding_mask"][row, :count] = False
            if "position_ids" in sample:
                batch["position_ids"][row, :count] = sample["position_ids"]
                batch["position_ids"][row, count:] = torch.arange(length - count)
        return batch
