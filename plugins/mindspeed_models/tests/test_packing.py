"""Rows of several samples, and micro-batches of similar lengths: nothing lost, twice or too long."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mindspeed_core.run import Sampling
from mindspeed_models.data import packing
from mindspeed_models.data.collate import Collate, Lengths
from mindspeed_models.data.length_groups import grouped_batches
from mindspeed_models.data.packing import PackedSamples, best_fit, packed_batches


class Samples:
    """Sample ``i`` has ``lengths[i]`` tokens, all of them ``i``."""

    def __init__(self, lengths):
        self.each = np.asarray(lengths)
        self.indices = self.each

    def __len__(self):
        return len(self.each)

    def lengths(self, index):
        return self.each[index]

    def __getitem__(self, index):
        row = torch.full((int(self.each[index]),), index)
        return {"tokens": row, "labels": row, "loss_mask": torch.ones(len(row))}


def sampling(dataset, rank=0, ranks=1, consumed=0, split="train", micro=2):
    return Sampling(dataset, split, consumed, micro, rank, ranks, split != "train", 1234)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60))
@example([40, 0])
@example([0, 0])
def test_best_fit_puts_every_item_into_one_row_that_has_room(lengths):
    rows = best_fit(lengths, 40)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in row) <= 40 for row in rows)
    # No two rows would fit into one.
    sums = sorted(sum(lengths[item] for item in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > 40


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=4, max_size=30), st.integers(1, 3), st.integers(0, 4))
def test_ranks_and_resumed_runs_share_the_same_packed_rows(lengths, ranks, consumed):
    data = PackedSamples(Samples(lengths))

    def take(count, **where):
        batches = packed_batches(sampling(data, **where), 16)
        return [next(batches) for _ in range(count)]

    whole = take(consumed * ranks + 2 * ranks)
    for rank in range(ranks):
        found = take(2, rank=rank, ranks=ranks, consumed=2 * consumed * ranks)
        assert found == whole[consumed * ranks + rank :: ranks][:2]


def test_every_sample_comes_once_before_any_comes_again():
    lengths = np.random.RandomState(3).randint(1, 20, size=57)
    rows = packing.packed_rows(sampling(PackedSamples(Samples(lengths))), 20, shuffled=True)
    seen = Counter()
    while len(seen) < 57:
        seen.update(next(rows))
    assert set(seen.values()) == {1}


def test_a_packed_row_begins_positions_again_and_fills_up_apart():
    data = PackedSamples(Samples([3, 2]))
    batch = Collate(Lengths(8))([data[0, 1]])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["tokens"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]
    assert batch["padding_mask"].tolist() == [[False] * 5 + [True] * 3]
    assert batch["loss_mask"].sum() == 5


def test_micro_batches_are_filled_up_as_far_as_asked():
    rows = [Samples([5, 40])[0], Samples([5, 40])[1]]
    for lengths, expected in (
        (Lengths(100), 100),
        (Lengths(100, fixed=False), 64),
        (Lengths(48, fixed=False), 48),
        (Lengths(100, fixed=False, buckets=(16, 50)), 50),
        (Lengths(100, fixed=False, buckets=(16, 20)), 100),
    ):
        batch = Collate(lengths)(rows)
        assert batch["tokens"].shape == (2, expected)
        assert (~batch["padding_mask"]).sum(1).tolist() == [5, 40]
    assert Lengths(64, fixed=False).of(0) == 32


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(8, 90))
def test_grouped_batches_take_every_sample_once_in_steps_of_one_length(ranks, accumulated, count):
    lengths = np.random.RandomState(count).randint(1, 100, size=count)
    step = 2 * ranks * accumulated
    data = Samples(lengths)
    whole = list(grouped_batches(sampling(data), step))
    keys = [key for batch in whole for key in batch]
    assert len(set(keys)) == len(keys) >= count - step
    shared = [list(grouped_batches(sampling(data, rank, ranks), step)) for rank in range(ranks)]
    assert [batch for turn in zip(*shared) for batch in turn] == whole[: len(shared[-1]) * ranks]
    later = list(grouped_batches(sampling(data, consumed=2), step))
    assert later == whole[1:]
    ordered = grouped_batches(sampling(data, split="validation"), step)
    assert [next(ordered) for _ in range(2)] == [[0, 1], [2, 3]]


def test_less_is_filled_up_in_groups():
    lengths = np.random.RandomState(5).randint(1, 500, size=640)
    data = Samples(lengths)

    def computed(batches):
        return sum(len(batch) * max(lengths[key] for key in batch) for batch in batches)

    plain = [[key, key + 1] for key in range(0, 640, 2)]
    assert computed(grouped_batches(sampling(data), 10)) < 0.85 * computed(plain)


def test_blends_know_the_lengths_of_their_samples():
    from megatron.core.datasets.blended_dataset import BlendedDataset

    from mindspeed_models.data.instruction_dataset import sample_lengths

    blend = BlendedDataset.__new__(BlendedDataset)
    vars(blend).update(
        datasets=[Samples([3, 4]), Samples([7])],
        dataset_index=np.array([0, 1, 0]),
        dataset_sample_index=np.array([1, 0, 0]),
        config=SimpleNamespace(defer_npy_index_mmap=False),
    )
    assert sample_lengths(blend, [0, 1, 2]).tolist() == [4, 7, 3]
