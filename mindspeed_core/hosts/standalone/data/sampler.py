"""The samples of a data-parallel rank, in order.

Position ``consumed + i*micro*dp + r*micro + j`` of the dataset is sample j of micro-batch i on rank r, as in
Megatron-LM: the samples of a step do not depend on how many ranks share them, and a resumed run goes on
exactly where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_core.errors import DataError


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
