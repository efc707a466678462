"""Micro-batches of a dry run: the fields and shapes that datasets give, without reading any."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch

from mindspeed_core.run import DataIterators, Datasets, Run


class NoSamples:
    """A dataset in a dry run: it exists, and has as many samples as the run wants.

    Attributes:
        samples: their number.
        kept: tensors that it keeps from its first sample on.
    """

    def __init__(self, samples: int | None) -> None:
        """Stand for ``samples`` samples, or for one pass."""
        self.samples = samples or 1
        self.kept: list[torch.Tensor] = []

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.samples


def no_datasets(num_samples: tuple[int, int | None, int]) -> Datasets:
    """Return datasets for the splits from which samples are wanted."""
    train, valid, test = (NoSamples(count) if count != 0 else None for count in num_samples)
    return Datasets(train, valid, test)


def shaped_iterators(run: Run) -> DataIterators:
    """Return endless iterators over micro-batches that have shapes alone, for every split there is."""
    assert run.datasets is not None
    args = run.args
    asked = run.session.call("batch_fields", args=args, pre_process=True, post_process=True)
    padded = "padding_mask" in asked

    def over(dataset: Any) -> list[Iterator[dict[str, torch.Tensor]]] | None:
        return None if dataset is None else [shaped_batches(args, dataset, padded=padded) for _ in run.model]

    found = run.datasets
    sets = {name: iterators for name, data in found.valid_sets.items() if (iterators := over(data))}
    train = None if run.args.skip_train else over(found.train)
    return DataIterators(train, over(found.valid), over(found.test), sets)


def shaped_batches(
    args: Namespace, dataset: NoSamples, *, padded: bool = False
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches with the fields of GPT datasets; ``padded`` adds the mask of padding."""
    while True:
        if not dataset.kept:
            dataset.kept += _kept(args)
        # Nothing here may hold on to a batch: it is freed after its step.
        yield _batch(args, padded=padded)


def _batch(args: Namespace, *, padded: bool) -> dict[str, torch.Tensor]:
    shape = (args.micro_batch_size, args.seq_length)
    batch = {
        "tokens": torch.empty(shape, dtype=torch.int64),
        "labels": torch.empty(shape, dtype=torch.int64),
        "loss_mask": torch.empty(shape, dtype=torch.float32),
        "position_ids": torch.empty(shape, dtype=torch.int64),
    }
    if padded:
        batch["padding_mask"] = torch.empty(shape, dtype=torch.bool)
    if args.create_attention_mask_in_dataloader:
        square = (args.micro_batch_size, 1, args.seq_length, args.seq_length)
        batch["attention_mask"] = torch.empty(square, dtype=torch.bool)
    return batch


def _kept(args: Namespace) -> Iterator[torch.Tensor]:
    """Yield what megatron-core's GPT dataset keeps of its first sample where all samples share it."""
    if args.reset_position_ids or args.reset_attention_mask or args.eod_mask_loss:
        return
    yield torch.empty(args.seq_length, dtype=torch.float32)
    yield torch.empty(args.seq_length, dtype=torch.int64)
    if args.create_attention_mask_in_dataloader:
        yield torch.empty((1, args.seq_length, args.seq_length), dtype=torch.bool)
