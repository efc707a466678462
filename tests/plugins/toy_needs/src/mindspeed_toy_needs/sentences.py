"""Sentences of different lengths: a dataset, a collate function and a batch sampler.

With ``--toy-tokens`` a micro-batch has as many sentences as fit, filled up to the longest of them, so that
micro-batches differ in both dimensions; without, one sentence after another is filled up to ``--seq-length``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_core.run import Datasets, Sampling


class Sentences:
    """Sentence ``i`` has 8 to 24 tokens that depend on ``i`` alone; there is no length."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def __getitem__(self, index: int) -> torch.Tensor:
        """``[n + 1]`` int64."""
        start = torch.arange(length_of(index) + 1)
        return (start * (index % 7 + 1) + index) % self.vocab_size


class CountedSentences(Sentences):
    """The same with a length, for the host's own order."""

    def __init__(self, vocab_size: int, count: int) -> None:
        super().__init__(vocab_size)
        self.count = count

    def __len__(self) -> int:
        return self.count


def length_of(index: int) -> int:
    """Tokens of a sentence, the last label left out."""
    return 8 + 4 * (index * 3 % 5)


def datasets(args: Namespace) -> Datasets:
    """Training data alone."""
    if not args.toy_tokens:
        return Datasets(
            CountedSentences(args.vocab_size, args.toy_sentences),
            collate=lambda sentences: filled_up(sentences, args.seq_length),
        )
    count, tokens = args.toy_sentences, args.toy_tokens
    return Datasets(
        Sentences(args.vocab_size),
        collate=filled_up,
        batch_sampler=lambda sampling: sampling.share(in_turn(sampling, count, tokens)),
    )


def in_turn(sampling: Sampling, count: int, tokens: int) -> Iterator[list[int]]:
    """The sentences in order, again and again, as many to a micro-batch as fit into ``tokens``."""
    found: list[int] = []
    index = 0
    while True:
        longest = max(map(length_of, [*found, index % count]))
        if found and longest * (len(found) + 1) > tokens:
            yield found
            found = []
        found.append(index % count)
        index += 1


def filled_up(sentences: list[torch.Tensor], length: int = 0) -> dict[str, Any]:
    """Tensors ``[b, s]``, and ``sentence_lengths`` ``[b]``."""
    lengths = torch.tensor([len(sentence) - 1 for sentence in sentences])
    length = length or int(lengths.max())
    whole = torch.zeros(len(sentences), length + 1, dtype=torch.int64)
    for row, sentence in zip(whole, sentences):
        row[: len(sentence)] = sentence
    positions = torch.arange(length).expand(len(sentences), -1).contiguous()
    return {
        "tokens": whole[:, :-1].contiguous(),
        "labels": whole[:, 1:].contiguous(),
        "loss_mask": (positions < lengths[:, None]).float(),
        "position_ids": positions,
        "sentence_lengths": lengths,
    }
