"""Ranks that share a group make the same calls in the same order, and every send meets its receive."""

import pytest

from mindspeed_megatron.instruments.call_order import OrderedCall, compare_order, disagreements
from mindspeed_testing.dry_run import MeasuredRank, differences

BOTH = (0, 1)
SUM = OrderedCall("tensor", BOTH, "all_reduce", 8, "float32")
GATHER = OrderedCall("tensor", BOTH, "all_gather_into_tensor", 4, "float32")
OTHER = OrderedCall("data", BOTH, "all_reduce", 8, "float32")
ALONE = OrderedCall("data", (0, 2), "all_reduce", 8, "float32")


def exchanged(size, operation="all_to_all_single"):
    return OrderedCall("experts", BOTH, operation, size, "bfloat16")


def message(operation, peer, size=16):
    return OrderedCall("pipeline", BOTH, operation, size, "bfloat16", peer)


def test_ranks_that_agree_count_what_they_share():
    sends = [SUM, ALONE, GATHER, message("isend", 1), message("irecv", 1, 32)]
    receives = [SUM, message("irecv", 0), GATHER, message("isend", 0, 32)]

    assert compare_order(0, sends, 1, receives) == (4, None)


@pytest.mark.parametrize(
    ("mine", "theirs", "places"),
    [
        ([SUM, GATHER], [GATHER, SUM], (0, 0)),
        ([SUM, OTHER], [OTHER, SUM], (0, 0)),
        ([ALONE, SUM, GATHER], [SUM], (2, None)),
        ([exchanged(4, "all_reduce")], [exchanged(8, "all_reduce")], (0, 0)),
        ([SUM, message("isend", 1)], [SUM], (1, None)),
        ([message("isend", 1)], [SUM, message("irecv", 0, 8)], (None, 0)),
        ([message("isend", 1)], [message("irecv", 0, 8)], (0, 0)),
    ],
    ids=["swapped", "swapped groups", "missing", "bytes", "no receive", "no collective", "message"],
)
def test_the_first_difference_is_named_with_its_places(mine, theirs, places):
    _, found = compare_order(0, mine, 1, theirs)

    assert found is not None
    assert found.ranks == BOTH
    assert found.places == places


def test_inputs_of_an_exchange_may_differ():
    assert compare_order(0, [exchanged(4)], 1, [exchanged(6)]) == (1, None)


def test_a_world_names_both_calls_of_ranks_that_would_wait_for_each_other():
    [line] = disagreements([[SUM, GATHER], [GATHER, SUM]])

    assert line.startswith("order of calls, tensor, call 0: rank 0: tensor: all_reduce of 8 B float32")
    assert "rank 1: tensor: all_gather_into_tensor of 4 B float32" in line


def test_a_dry_run_whose_ranks_disagree_is_wrong_even_where_it_equals_the_real_one():
    ranks = [MeasuredRank({}, calls, (), ()) for calls in ((SUM, GATHER), (GATHER, SUM))]

    assert differences(ranks, ranks) == disagreements([rank.calls for rank in ranks])
    assert differences(ranks[:1], ranks[:1]) == []
