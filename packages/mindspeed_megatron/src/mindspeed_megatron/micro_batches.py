"""The samples of a data-parallel rank, in order, and the loader that reads them.

Position ``consumed + i*micro*dp + r*micro + j`` of the dataset is sample j of micro-batch i on rank r, as in
Megatron-LM: the samples of a step do not depend on how many ranks share them, and a resumed run goes on
exactly where it stopped.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from mindspeed_core.errors import DataError
from mindspeed_megatron.loading_processes import end_by_parent_alone

if TYPE_CHECKING:
    from mindspeed_core.run import Datasets, Sampling


class MicroBatchSampler:
    """Yields the dataset positions of one micro-batch after the other, for one data-parallel rank."""

    def __init__(
        self,
        total_samples: int,
        *,
        consumed_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        endless: bool = False,
        name: str = "train",
    ) -> None:
        """Set the sampler to a position.

        Args:
            total_samples: length of the dataset.
            consumed_samples: samples that all ranks together have used before.
            micro_batch_size: samples per micro-batch and rank.
            dp_rank: this rank within data parallelism.
            dp_size: number of data-parallel ranks.
            endless: begin again at the start when the dataset is used up.
            name: the split, for errors.

        Raises:
            DataError: the dataset does not fill one micro-batch on every rank.
        """
        self.stride = micro_batch_size * dp_size
        self.usable = total_samples // self.stride * self.stride
        if self.usable == 0:
            raise DataError(
                f"the {name} dataset has {total_samples} samples, fewer than --micro-batch-size "
                f"{micro_batch_size} on {dp_size} data-parallel ranks need; give more data, a larger share "
                "in --split, or a smaller --micro-batch-size"
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.first = dp_rank * micro_batch_size
        self.endless = endless
        self.name = name

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of ``micro_batch_size`` positions; an incomplete last slice is left out."""
        position = self.consumed_samples
        while True:
            start = position % self.usable if self.endless else position
            if start + self.stride > self.total_samples:
                if not self.endless:
                    return
                # Only a position inside a slice (the batch size changed) gets here; it begins the next round.
                position += self.usable - start
                start = 0
            begin = start + self.first
            yield list(range(begin, begin + self.micro_batch_size))
            position += self.stride

    def used_up(self) -> DataError:
        """Make the error for reading on after the end of a sampler that is not endless."""
        return DataError(
            f"the {self.name} dataset is used up: it has {self.total_samples} samples, the run started at "
            f"{self.consumed_samples}; lower --train-iters, or give more data (weights in --data-path repeat "
            "datasets)"
        )


def micro_batches(
    datasets: Datasets,
    sampling: Sampling,
    *,
    num_workers: int,
    pin_memory: bool,
    owner: str = "",
    order: Iterable[list[Any]] | None = None,
) -> Generator[Any, None, None]:
    """Return an iterator over a rank's micro-batches, which starts its workers when it is first asked.

    ``close()`` ends them.

    Args:
        datasets: says how samples become a micro-batch, and which ones.
        sampling: the dataset, and where to begin.
        num_workers: loading processes; 0 loads in this one.
        pin_memory: copy tensors to memory from which a device reads faster.
        owner: the feature that brings the data, for errors.
        order: the positions of each micro-batch of this rank, without end; by default one behind the other.

    Raises:
        DataError: the dataset cannot be read by position, or is too small for the ranks.
    """
    name = f"{owner}: the {sampling.split} dataset" if owner else f"the {sampling.split} dataset"
    _check_by_position(sampling.dataset, name, needs_length=datasets.batch_sampler is None)
    if datasets.batch_sampler is None and order is not None:
        used_up = DataError(f"{name} is used up")
    elif datasets.batch_sampler is None:
        order = sampler = MicroBatchSampler(
            len(sampling.dataset),
            consumed_samples=sampling.consumed_samples,
            micro_batch_size=sampling.micro_batch_size,
            dp_rank=sampling.dp_rank,
            dp_size=sampling.dp_size,
            endless=sampling.endless,
            name=sampling.split,
        )
        used_up = sampler.used_up()
    else:
        order = datasets.batch_sampler(sampling)
        used_up = DataError(
            f"{name} is used up: its batch sampler ended before the run, which started at "
            f"{sampling.consumed_samples} samples; lower --train-iters, or begin again where sampling.endless"
        )
    loader: DataLoader[Any] = DataLoader(
        sampling.dataset,
        batch_sampler=order,
        collate_fn=datasets.collate,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # A loader draws a seed when it starts; from the default generator it would change the model.
        generator=torch.Generator().manual_seed(sampling.seed),
        worker_init_fn=end_by_parent_alone,
    )
    return _until_used_up(loader, used_up)


def check_shape(sample: Any, shape: tuple[int, int], remedy: str) -> None:
    """Refuse a micro-batch of another shape than the one that is expected elsewhere.

    Args:
        sample: tensors ``[b, s]`` by name.
        shape: ``--micro-batch-size`` and ``--seq-length``.
        remedy: what the user can do.

    Raises:
        DataError: names the field and both shapes.
    """
    for name in ("tokens", "labels"):
        found = tuple(sample[name].shape) if name in sample else shape
        if found != shape:
            raise DataError(
                f"{name} of a micro-batch have the shape {list(found)}, --micro-batch-size and --seq-length "
                f"say {list(shape)}; {remedy}"
            )


def _check_by_position(dataset: Any, name: str, *, needs_length: bool) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name} ({type(dataset).__name__}) can only be iterated, so that ranks cannot share it and a "
            "resumed run cannot go on in it; give it __getitem__. With a batch sampler it needs no length"
        )
    if needs_length and not hasattr(dataset, "__len__"):
        raise DataError(
            f"{name} ({type(dataset).__name__}) has no length; give it __len__, or Datasets a batch_sampler"
        )


def _until_used_up(loader: DataLoader[Any], used_up: DataError) -> Generator[Any, None, None]:
    yield from loader
    # Raised here and not by the sampler, which workers run ahead of the training.
    raise used_up
