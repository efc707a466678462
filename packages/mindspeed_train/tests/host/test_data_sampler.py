"""Samples that each data-parallel rank reads."""

from __future__ import annotations

from itertools import islice

import pytest

from mindspeed_core.errors import DataError
from mindspeed_megatron.micro_batches import MicroBatchSampler


def sampler(total, *, consumed=0, micro=2, rank=0, size=3, endless=False):
    return MicroBatchSampler(
        total, consumed_samples=consumed, micro_batch_size=micro, dp_rank=rank, dp_size=size, endless=endless
    )


def test_positions_follow_the_formula():
    consumed, micro, size = 12, 2, 3
    for rank in range(size):
        for i, positions in enumerate(islice(sampler(100, consumed=consumed, rank=rank), 5)):
            assert positions == [consumed + i * micro * size + rank * micro + j for j in range(micro)]


@pytest.mark.parametrize(("micro", "size"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_a_step_has_the_same_samples_for_any_split_over_ranks(micro, size):
    seen = [p for rank in range(size) for b in sampler(12, micro=micro, rank=rank, size=size) for p in b]
    assert sorted(seen) == list(range(12))


def test_an_incomplete_last_slice_is_left_out():
    assert list(sampler(11, micro=2, size=2)) == [[0, 1], [4, 5]]


def test_resuming_continues_where_the_run_stopped():
    whole = list(sampler(60))
    assert list(sampler(60, consumed=18)) == whole[3:]


def test_an_endless_sampler_begins_again_and_never_leaves_the_dataset():
    found = list(islice(sampler(13, rank=2, endless=True), 5))
    assert found == [[4, 5], [10, 11], [4, 5], [10, 11], [4, 5]]


def test_an_endless_sampler_resumes_inside_a_later_round():
    whole = list(islice(sampler(13, endless=True), 9))
    assert list(islice(sampler(13, consumed=30, endless=True), 4)) == whole[5:]


def test_an_endless_sampler_survives_a_position_inside_a_slice():
    found = list(islice(sampler(12, consumed=9, rank=2, endless=True), 3))
    assert found == [[4, 5], [10, 11], [4, 5]]


def test_too_small_a_dataset_is_refused():
    with pytest.raises(DataError, match=r"5 samples.*--micro-batch-size 2"):
        sampler(5)
