"""Made-up batches that are a function of the numbers of their samples, with some of their tokens masked.

Whatever the layout, sample ``n`` of a training has the same tokens and the same loss mask, so that a
definition in one process (`mindspeed_testing.dense_model`) can be given the batches of any of them.
`Whole`, `Half`, `Tenth` and `Uneven` are probes: objects that put such batches in the place of the host's,
before any feature sees them::

    train_side(flags, 2, probes=PROBES["uneven"])
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_core.feature import hookimpl
from mindspeed_testing.dense_model import DenseBatch

if TYPE_CHECKING:
    from mindspeed_core.run import Batch, Run

Sample = tuple[Tensor, Tensor, Tensor]


def _whole(number: int, places: Tensor) -> Tensor:
    return torch.ones_like(places)


def _half(number: int, places: Tensor) -> Tensor:
    return places % 2


def _tenth(number: int, places: Tensor) -> Tensor:
    return places >= 0.9 * len(places)


def _uneven(number: int, places: Tensor) -> Tensor:
    return places < len(places) * (number % 4) / 3


MASKS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "whole": _whole,
    "half": _half,
    "tenth": _tenth,
    "uneven": _uneven,
}
"""Masks by name: all tokens count, every second, the last tenth; of four samples one not at all."""


def numbered_sample(number: int, mask: str, *, length: int, vocabulary: int) -> Sample:
    """Return tokens, labels and loss mask of a sample, ``[s]`` each.

    Args:
        number: of the sample in the training.
        mask: a name of `MASKS`.
        length: ``s``.
        vocabulary: number of tokens; small ones come often, so that experts are used unevenly.
    """
    drawn = torch.rand(length + 1, generator=torch.Generator().manual_seed(number)).square()
    tokens = (drawn * vocabulary).long()
    return tokens[:-1], tokens[1:], MASKS[mask](number, torch.arange(length)).float()


def numbered_step(
    step: int, mask: str, *, batch: int, micro: int, ranks: int, length: int, vocabulary: int
) -> list[DenseBatch]:
    """Return the micro-batches of a step, of all data-parallel ranks.

    Args:
        step: from 0 on.
        mask: a name of `MASKS`.
        batch: ``--global-batch-size``.
        micro: ``--micro-batch-size``.
        ranks: of data parallelism.
        length: ``--seq-length``.
        vocabulary: ``--vocab-size``.
    """
    samples = [
        numbered_sample(step * batch + index, mask, length=length, vocabulary=vocabulary)
        for index in range(batch)
    ]
    parts = [torch.stack(values).view(-1, ranks, micro, length) for values in zip(*samples)]
    return [DenseBatch(*fields) for fields in zip(*parts)]


class Whole:
    """Batches of which every token counts."""

    mask = "whole"

    @hookimpl(wrapper=True, trylast=True)
    def get_batch(self, run: Run, microbatch: int) -> Generator[None, Batch, Batch]:
        """Return the batch of the same samples, made up."""
        batch = yield
        size, ranks = run.args.micro_batch_size, run.pg.dp.size()
        first = run.consumed_train_samples + (microbatch * ranks + run.pg.dp.rank()) * size
        found = [
            numbered_sample(
                first + index, self.mask, length=run.args.seq_length, vocabulary=run.args.vocab_size
            )
            for index in range(size)
        ]
        new: dict[str, Any] = dict(zip(("tokens", "labels", "loss_mask"), map(torch.stack, zip(*found))))
        # Pipeline stages have what they need of a batch.
        return batch.with_(**{name: value for name, value in new.items() if getattr(batch, name) is not None})


class Half(Whole):
    """Batches of which every second token counts."""

    mask = "half"


class Tenth(Whole):
    """Batches of which the last tenth of every sample counts."""

    mask = "tenth"


class Uneven(Whole):
    """Batches of which one of four samples does not count, and one wholly."""

    mask = "uneven"


PROBES = {kind.mask: (f"{__name__}:{kind.__name__}",) for kind in (Whole, Half, Tenth, Uneven)}
"""For ``train_side(probes=...)``, by the name of the mask."""
