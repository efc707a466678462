"""Samples of similar lengths side by side (``--group-by-length``): less is filled up.

Within a window of some steps samples are sorted by length and cut into steps, whose order is drawn. So the
ranks of a step have samples of one length, and no rank waits for another; over a window every sample comes
once, as without groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np

from mindspeed_core.run import Sampling
from mindspeed_models.data.instruction_dataset import sample_lengths

STEPS = 64
"""Steps of a window."""


def grouped_batches(sampling: Sampling, global_batch_size: int) -> Iterator[list[int]]:
    """Yield this rank's micro-batches; those of validation and test in order.

    Args:
        sampling: the dataset, its split and this rank's share.
        global_batch_size: samples of a step over all ranks.
    """
    if sampling.split != "train":
        return sampling.share(_in_order(sampling))
    return sampling.share(_grouped(sampling, global_batch_size))


def _in_order(sampling: Sampling) -> Iterator[list[int]]:
    size, total = sampling.micro_batch_size, len(sampling.dataset)
    for number in count():
        if not sampling.endless and (number + 1) * size > total:
            return
        yield [key % total for key in range(number * size, (number + 1) * size)]


def _grouped(sampling: Sampling, global_batch_size: int) -> Iterator[list[int]]:
    total = len(sampling.dataset)
    window = STEPS * global_batch_size
    for number, begin in enumerate(range(0, total, window)):
        keys = np.arange(begin, min(begin + window, total))
        order = keys[np.argsort(sample_lengths(sampling.dataset, keys), kind="stable")]
        steps = [order[at : at + global_batch_size] for at in range(0, len(order), global_batch_size)]
        whole = [step for step in steps if len(step) == global_batch_size]
        np.random.RandomState((sampling.seed + number) % 2**32).shuffle(whole)
        for step in [*whole, *(step for step in steps if len(step) < global_batch_size)]:
            for at in range(0, len(step) - sampling.micro_batch_size + 1, sampling.micro_batch_size):
                yield [int(key) for key in step[at : at + sampling.micro_batch_size]]
