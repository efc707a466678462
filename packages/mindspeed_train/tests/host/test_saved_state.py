"""A state is split into shards and the rest as megatron-core splits it."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from mindspeed_train.checkpoint.saved_state import split


def shard(key, part=None):
    tensor = ShardedTensor.from_rank_offsets(key, torch.zeros(4))
    tensor.flattened_range = part
    return tensor


def halves(key, tensor, replica_id, flattened_range):
    return {"first": shard(f"{key}.1"), "second": [shard(f"{key}.2"), shard(f"{key}.3", slice(1, 1))]}


LEAVES = st.one_of(
    st.integers(),
    st.just(None),
    st.builds(shard, st.sampled_from("abc"), st.sampled_from([None, slice(0, 4), slice(2, 2)])),
    st.builds(lambda key: ShardedObject(key, 1, (1,), (0,)), st.sampled_from("abc")),
    st.builds(lambda key: ShardedTensorFactory(key, torch.zeros(4), halves, dict), st.sampled_from("abc")),
    st.builds(LocalNonpersistentObject, st.integers()),
)
STATES = st.dictionaries(
    st.sampled_from("uvwxyz"),
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("uvwxyz"), inner),
        max_leaves=20,
    ),
)


@given(STATES)
def test_it_is_what_megatron_core_makes_of_it(state):
    expected = save_preprocess(copy.deepcopy(state), validate_access_integrity=False)
    assert repr(split(state)) == repr(expected)


def test_the_state_itself_stays_as_it_is():
    factory = ShardedTensorFactory("a", torch.zeros(4), halves, dict)
    state = {"u": [factory, 1]}
    sharded, common = split(state)
    assert state == {"u": [factory, 1]}
    assert [list(sharded["u"][0]), common] == [["first", "second"], {"u": [1]}]
