"""The digest of a base: the same for any cut, another one for any change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from mindspeed_models.lora.base_digest import _digest_of, digest_of_whole

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)
WHOLE = 2**64 - 1


def drawn(shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, data=st.data())
def test_parts_of_any_cut_add_up_to_the_whole(shape, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    parts = data.draw(st.integers(1, 3))
    shape[axis] *= parts
    whole = drawn(shape)
    total = sum(
        int(_digest_of(ShardedTensor.from_rank_offsets("a.weight", part.contiguous(), (axis, number, parts))))
        for number, part in enumerate(whole.chunk(parts, axis))
    )
    assert total & WHOLE == digest_of_whole("a.weight", whole) & WHOLE


def test_an_expert_is_its_part_of_all_experts():
    whole = drawn((3, 4, 5))
    total = sum(digest_of_whole("e.weight", whole[number], number, 3) for number in range(3))
    assert total & WHOLE == digest_of_whole("e.weight", whole) & WHOLE


def test_rows_that_pad_a_vocabulary_do_not_count():
    rows = drawn((5, 4))
    padded = torch.cat([rows, torch.zeros(3, 4)])
    assert digest_of_whole("e.weight", padded) == digest_of_whole("e.weight", rows)


def test_a_copy_in_bfloat16_has_the_same():
    weight = drawn((7, 3))
    assert digest_of_whole("a.weight", weight.bfloat16()) == digest_of_whole("a.weight", weight)


@pytest.mark.parametrize("change", ["swapped rows", "another name", "one element", "transposed"])
def test_another_base_has_another(change):
    weight = drawn((4, 4))
    before = digest_of_whole("a.weight", weight)
    key, other = "a.weight", weight.clone()
    if change == "swapped rows":
        other = weight[[1, 0, 2, 3]]
    elif change == "another name":
        key = "b.weight"
    elif change == "one element":
        other[2, 1] *= 1.01
    else:
        other = weight.t().contiguous()
    assert digest_of_whole(key, other) != before
