"""``--dataloader-type cyclic``: Megatron-LM's random order, and going on in it."""

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_core.errors import DataError
from mindspeed_core.run import Sampling
from mindspeed_megatron.random_sampler import RandomSampler

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(16, 60), st.booleans())


def batches(total, micro, dp, rank, sharded, count, consumed=0):
    sampling = Sampling(
        dataset=range(total),
        split="train",
        consumed_samples=consumed,
        micro_batch_size=micro,
        dp_rank=rank,
        dp_size=dp,
        endless=False,
        seed=1,
    )
    return list(islice(RandomSampler(sampling, sharded=sharded), count))


def reference(total, micro, dp, rank, sharded, epoch):
    """The micro-batches of one round, by the rule of MegatronPretrainingRandomSampler."""
    generator = torch.Generator()
    generator.manual_seed(epoch)
    if sharded:
        bucket = total // (micro * dp) * micro
        order = [rank * bucket + i for i in torch.randperm(bucket, generator=generator).tolist()]
    else:
        order = torch.randperm(total // micro * micro, generator=generator).tolist()[rank::dp]
    whole = [order[i : i + micro] for i in range(0, len(order), micro)]
    return [batch for batch in whole if len(batch) == micro][: total // (micro * dp)]


@given(SIZES, st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_order_of_each_round_is_megatron_lms(sizes, epoch):
    micro, dp, total, sharded = sizes
    rounds = total // (micro * dp)
    for rank in range(dp):
        found = batches(total, micro, dp, rank, sharded, rounds * (epoch + 1))
        assert found[rounds * epoch :] == reference(total, micro, dp, rank, sharded, epoch)


@given(SIZES, st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_a_resumed_run_goes_on_where_it_stopped(sizes, done):
    micro, dp, total, sharded = sizes
    whole = batches(total, micro, dp, dp - 1, sharded, done + 8)
    assert batches(total, micro, dp, dp - 1, sharded, 8, consumed=done * micro * dp) == whole[done:]


@given(SIZES)
@settings(max_examples=60, deadline=None)
def test_ranks_share_no_sample_of_a_round(sizes):
    micro, dp, total, sharded = sizes
    rounds = total // (micro * dp)
    seen = [i for rank in range(dp) for b in batches(total, micro, dp, rank, sharded, rounds) for i in b]
    assert len(seen) == len(set(seen)) == rounds * micro * dp


def test_the_samples_of_a_step_do_not_depend_on_the_number_of_ranks_without_sharding():
    one = [i for batch in batches(32, 1, 1, 0, False, 8) for i in batch]
    both = [batches(32, 1, 2, rank, False, 4) for rank in (0, 1)]
    assert one == [i for pair in zip(*both) for batch in pair for i in batch]


def test_samples_that_end_inside_of_a_micro_batch_of_all_ranks_are_refused():
    with pytest.raises(DataError, match="3 samples were used before"):
        batches(32, 1, 2, 0, True, 1, consumed=3)


def test_too_few_samples_are_refused():
    with pytest.raises(DataError, match="fewer than --micro-batch-size 4"):
        batches(7, 4, 2, 0, True, 1)
