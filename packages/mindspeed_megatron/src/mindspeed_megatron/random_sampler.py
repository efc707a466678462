"""Samples in a new random order in each round through the data: ``--dataloader-type cyclic``.

The order is Megatron-LM's (``MegatronPretrainingRandomSampler``): the number of the round is its seed. By
default each data-parallel rank shuffles a part of the data that is its own, so that the samples of a step
depend on the number of ranks; with ``--no-data-sharding`` all ranks share one order and they do not.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mindspeed_core.errors import DataError
from mindspeed_core.run import Sampling


class RandomSampler:
    """Yields the dataset positions of one micro-batch after the other, round after round, for one rank."""

    def __init__(self, sampling: Sampling, *, sharded: bool) -> None:
        """Set the sampler to a position.

        Args:
            sampling: the dataset, and where to begin.
            sharded: each rank has a part of the data of its own.

        Raises:
            DataError: the dataset does not fill one micro-batch on every rank, or the samples used before
                end inside a micro-batch of all ranks.
        """
        total = len(sampling.dataset)
        stride = sampling.micro_batch_size * sampling.dp_size
        self._usable = total // stride * stride
        if not self._usable:
            raise DataError(
                f"the {sampling.split} dataset has {total} samples, fewer than --micro-batch-size "
                f"{sampling.micro_batch_size} on {sampling.dp_size} data-parallel ranks need; give more "
                "data, a larger share in --split, or a smaller --micro-batch-size"
            )
        if sampling.consumed_samples % self._usable % stride:
            raise DataError(
                f"--dataloader-type cyclic: {sampling.consumed_samples} samples were used before, which is "
                f"no multiple of --micro-batch-size {sampling.micro_batch_size} on {sampling.dp_size} "
                "data-parallel ranks; go on with the sizes that the run began with"
            )
        self._total, self._sampling, self._sharded = total, sampling, sharded

    def __iter__(self) -> Iterator[list[int]]:
        """Yield lists of ``micro_batch_size`` positions without end."""
        position = self._sampling.consumed_samples
        while True:
            yield from self._round(position // self._usable, position % self._usable)
            position += self._usable - position % self._usable

    def _round(self, number: int, begun: int) -> Iterator[list[int]]:
        """Yield this rank's micro-batches of a round of which all ranks have used ``begun`` samples."""
        sampling, micro = self._sampling, self._sampling.micro_batch_size
        generator = torch.Generator().manual_seed(number)
        if self._sharded:
            bucket = self._usable // sampling.dp_size
            order = torch.randperm(bucket, generator=generator)[begun // sampling.dp_size :]
            samples = (order + sampling.dp_rank * bucket).tolist()
        else:
            order = torch.randperm(self._total // micro * micro, generator=generator)[begun:]
            samples = order[sampling.dp_rank :: sampling.dp_size].tolist()
        # Ranks take the same number: what is left over at the end of a round is left out.
        for start in range(0, (self._usable - begun) // sampling.dp_size, micro):
            yield samples[start : start + micro]
