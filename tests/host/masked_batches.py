"""Batches that are a function of a sample's number, whatever its rank, with some of their tokens masked."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mindspeed_core.feature import hookimpl
from mindspeed_core.testing.dense_model import DenseBatch

LENGTH, VOCABULARY = 32, 128


def half(sample: int) -> torch.Tensor:
    """Every second token counts."""
    return (torch.arange(LENGTH) % 2).float()


def tenth(sample: int) -> torch.Tensor:
    """Three of 32 tokens count, as in finetuning."""
    return (torch.arange(LENGTH) >= LENGTH - 3).float()


def uneven(sample: int) -> torch.Tensor:
    """Of four samples one counts not at all, and one wholly."""
    return (torch.arange(LENGTH) < LENGTH * (sample % 4) / 3).float()


def whole(sample: int) -> torch.Tensor:
    """Every token counts."""
    return torch.ones(LENGTH)


MASKS = {"whole": whole, "half": half, "tenth": tenth, "uneven": uneven}


def sample_of(number: int, mask: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and mask ``[s]``."""
    # Few tokens come often, so that experts are used unevenly.
    drawn = torch.rand(LENGTH + 1, generator=torch.Generator().manual_seed(number)).square()
    tokens = (drawn * VOCABULARY).long()
    return tokens[:-1], tokens[1:], MASKS[mask](number)


def step_batches(step: int, mask: str, *, batch: int, micro: int, ranks: int) -> list[DenseBatch]:
    """The micro-batches of a step of all data-parallel ranks."""
    samples = [sample_of(step * batch + index, mask) for index in range(batch)]
    parts = [torch.stack(values).view(-1, ranks, micro, LENGTH) for values in zip(*samples)]
    return [DenseBatch(*fields) for fields in zip(*parts)]


class Masked:
    """Puts these batches in the place of the host's, before any feature sees them."""

    mask = "whole"

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self, run, microbatch) -> Iterator[None]:
        batch = yield
        if batch.tokens is None and batch.labels is None:
            return batch
        size, ranks = run.args.micro_batch_size, run.pg.dp.size()
        first = run.consumed_train_samples + (microbatch * ranks + run.pg.dp.rank()) * size
        found = [sample_of(first + index, self.mask) for index in range(size)]
        new = dict(zip(("tokens", "labels", "loss_mask"), map(torch.stack, zip(*found))))
        return batch.with_(**{name: value for name, value in new.items() if getattr(batch, name) is not None})


class Half(Masked):
    mask = "half"


class Tenth(Masked):
    mask = "tenth"


class Uneven(Masked):
    mask = "uneven"


PROBES = {kind.mask: kind for kind in (Masked, Half, Tenth, Uneven)}
