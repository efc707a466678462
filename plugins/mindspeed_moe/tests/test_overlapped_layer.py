"""Order of work in an overlapped layer, traffic, and what is left behind, on two ranks."""

import pytest
import torch

from mindspeed_moe.features.proofs import EP2, GATHER_OVERLAP, MODEL, OVERLAP, SHARED
from mindspeed_testing import run_world

ONE_CALL = (*MODEL, *EP2, "--num-layers", "1", "--global-batch-size", "2", "--micro-batch-size", "1")
ADAPTIVE = ("--moe-adaptive-recompute-activation", "--moe-adaptive-recompute-activation-scale")
WIDE = ("--num-layers", "2", "--moe-ffn-hidden-size", "96")
GATHERED = ("--moe-token-dispatcher-type", "allgather")
ASYNC = ("--moe-permutation-async-comm",)
ZERO = ("--moe-zero-memory",)
NO_LAYER = ("--moe-zero-memory-num-layers", "0")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "moe")
FORWARD = (
    *("dispatch launch", "probs launch", "shared fc1", "dispatch wait", "probs wait"),
    *("gmm1", "gmm2", "combine launch", "shared fc2", "combine wait"),
)
BACKWARD = (
    *("combine launch", "shared fc2", "combine wait", "gmm2 dx", "gmm1 dx", "probs launch"),
    *("dispatch launch", "shared fc1", "probs wait", "gmm2 dW", "gmm1 dW", "dispatch wait"),
)
# Where waiting would raise the peak, the second weight learns at once.
AT_ONCE = (
    *("combine launch", "shared fc2", "combine wait", "gmm2 dx", "gmm2 dW", "gmm1 dx", "probs launch"),
    *("dispatch launch", "shared fc1", "probs wait", "gmm1 dW", "dispatch wait"),
)

GATHERED_FORWARD = (
    *("map launch", "probs launch", "dispatch launch", "shared fc1"),
    *("map wait", "probs wait", "dispatch wait", "gmm1", "gmm2"),
    *("combine launch", "shared fc2", "combine wait"),
)
GATHERED_BACKWARD = (
    *("combine launch", "shared fc2", "combine wait", "gmm2 dx", "gmm2 dW", "gmm1 dx"),
    *("dispatch launch", "probs launch", "shared fc1", "gmm1 dW", "dispatch wait", "probs wait"),
)


def train_all():
    from recorded_steps import recorded

    return {
        "shared": recorded((*ONE_CALL, *SHARED, *OVERLAP)),
        "wide": recorded((*ONE_CALL, *SHARED, *OVERLAP, *WIDE)),
        "gathered": recorded((*ONE_CALL, *SHARED, *GATHERED, *GATHER_OVERLAP)),
        "level0": recorded((*ONE_CALL, *SHARED, *OVERLAP, *ZERO, "level0")),
        "level1": recorded((*ONE_CALL, *SHARED, *OVERLAP, *ZERO, "level1")),
        "activation": recorded((*ONE_CALL, *SHARED, *OVERLAP, *ZERO, "level1", *NO_LAYER)),
        "together": recorded((*ONE_CALL, *SHARED, *ASYNC)),
        "crowded": recorded((*ONE_CALL, *SHARED, *SHARDED, *OVERLAP), steps=2, crowded=True),
        "crowded plain": recorded((*ONE_CALL, *SHARED, *SHARDED), steps=2, crowded=True),
    }


def train_more():
    from recorded_steps import recorded

    return {
        "recomputed": recorded((*ONE_CALL, *SHARED, *OVERLAP, *RECOMPUTED)),
        "extreme": recorded((*ONE_CALL, *SHARED, *OVERLAP, *ADAPTIVE, "0.9"), steps=2, crowded=True),
        "moderate": recorded((*ONE_CALL, *SHARED, *ADAPTIVE, "1.5"), steps=2, crowded=True),
        "gathered extreme": recorded(
            (*ONE_CALL, *SHARED, *GATHERED, *ADAPTIVE, "0.9"), steps=2, crowded=True
        ),
        "even": recorded((*ONE_CALL, *SHARED, *ADAPTIVE, "1.9")),
    }


@pytest.fixture(scope="module")
def ranks():
    return run_world(train_all, 2)


@pytest.fixture(scope="module")
def more(ranks):
    """Those of ``ranks``, and further trainings that only the longer run pays for."""
    return [first | further for first, further in zip(ranks, run_world(train_more, 2), strict=True)]


def directed(events, direction):
    return tuple(event[2:] for event in events if event.startswith(direction))


def test_forward_computes_shared_experts_while_rows_travel(ranks):
    for rank in ranks:
        assert directed(rank["shared"].events, "F") == FORWARD


def test_backward_mirrors_it_and_computes_weight_gradients_in_between(ranks):
    for rank in ranks:
        assert directed(rank["wide"].events, "B") == (*BACKWARD, *BACKWARD)


def test_the_second_weight_learns_at_once_where_waiting_would_raise_the_peak(ranks):
    for rank in ranks:
        assert directed(rank["shared"].events, "B") == AT_ONCE


def test_gathered_tokens_travel_beside_shared_experts_and_weight_gradients(ranks):
    for rank in ranks:
        assert directed(rank["gathered"].events, "F") == GATHERED_FORWARD
        assert directed(rank["gathered"].events, "B") == GATHERED_BACKWARD


def test_without_overlap_the_exchanges_of_a_direction_are_launched_together(ranks):
    there = ("dispatch launch", "probs launch", "dispatch wait", "probs wait")
    back = ("combine launch", "combine wait")
    mirrored = ("probs launch", "dispatch launch", "probs wait", "dispatch wait")
    for rank in ranks:
        assert directed(rank["together"].events, "F") == (*there, *back)
        assert directed(rank["together"].events, "B") == (*back, *mirrored)


def test_gathered_bytes_are_those_of_map_probabilities_and_rows(ranks):
    tokens, hidden, experts = 32, 64, 4
    rows, probs = tokens * hidden * 4, tokens * experts * 4
    for rank in ranks:
        assert rank["gathered"].sent["all_gather_into_tensor"] == (4, 2 * rows + probs + tokens * experts)
        assert rank["gathered"].sent["reduce_scatter_tensor"] == (3, 2 * rows + probs)


@pytest.mark.thorough
def test_a_recomputed_layer_keeps_the_order(more):
    for rank in more:
        # Without gradients the experts multiply as they do without the feature.
        first = tuple(event for event in FORWARD if not event.startswith("gmm"))
        assert directed(rank["recomputed"].events, "F") == (*first, *FORWARD)
        assert directed(rank["recomputed"].events, "B") == AT_ONCE


def test_a_layer_exchanges_three_times_forward_and_three_times_backward(ranks):
    for rank in ranks:
        assert rank["shared"].sent["all_to_all_single"][0] == 6


def test_bytes_sent_are_those_of_the_rows_that_leave_the_rank(ranks):
    row, number = 64 * 4, 4
    for me, rank in enumerate(ranks):
        _, received, sent = rank["shared"].rows[0]
        to_others, from_others = sum(sent) - sent[me], sum(received) - received[me]
        assert rank["shared"].sent["all_to_all_single"][1] == (to_others + from_others) * (2 * row + number)


def rows_of(found, me):
    """Return how many rows the experts of a rank receive, and how many of them from others."""
    _, received, _ = found.rows[0]
    return sum(received), sum(received) - received[me]


@pytest.mark.parametrize(
    ("level", "row"),
    [
        ("shared", 4 * (64 + 64 + 32) + 4),
        ("activation", 4 * (64 + 64) + 4),
        ("level0", 4 * 64 + 4),
        ("level1", 0),
    ],
)
def test_experts_keep_what_the_formula_says(ranks, level, row):
    for me, rank in enumerate(ranks):
        rows, _ = rows_of(rank[level], me)
        assert rank[level].kept_bytes == rows * row


@pytest.mark.parametrize(("level", "again", "number"), [("level0", 1, 0), ("level1", 2, 4)])
def test_rows_that_are_sent_again_are_the_rows_that_were_sent(ranks, level, again, number):
    for me, rank in enumerate(ranks):
        _, _, sent = rank[level].rows[0]
        calls, bytes_sent = rank[level].sent["all_to_all_single"]
        before, bytes_before = rank["shared"].sent["all_to_all_single"]
        assert calls == before + again
        assert bytes_sent == bytes_before + (sum(sent) - sent[me]) * (64 * 4 + number)


def test_rows_arrive_again_before_the_weight_gradient_that_needs_them(ranks):
    for rank in ranks:
        events = rank["level0"].events
        again = [event for event in events if "again" in event]
        assert again == ["F dispatch again launch", "F dispatch again wait"]
        launch, wait = (events.index(event) for event in again)
        hidden = ["B probs launch", "B dispatch launch", "B shared fc1"]
        assert [event for event in events[launch:wait] if event in hidden] == hidden
        assert events[wait + 1 : wait + 2] == ["B gmm1 dW"]


@pytest.mark.parametrize("case", ["shared", "crowded", "level0", "level1"])
def test_no_handle_outlives_its_wait(ranks, case):
    assert [rank[case].kept for rank in ranks] == [0, 0]


@pytest.mark.thorough
def test_no_handle_outlives_its_wait_in_a_recomputed_layer(more):
    assert [rank["recomputed"].kept for rank in more] == [0, 0]


def test_a_rank_without_rows_takes_part_and_trains_the_same(ranks):
    assert sum(ranks[1]["crowded"].rows[0][1]) == 0
    assert sum(ranks[0]["crowded"].rows[0][1]) > 0
    for rank in ranks:
        ours, plain = rank["crowded"], rank["crowded plain"]
        assert ours.losses == plain.losses
        assert [
            name for name, value in ours.parameters.items() if not torch.equal(value, plain.parameters[name])
        ] == []


@pytest.mark.thorough
def test_an_extremely_crowded_call_keeps_nothing(more):
    assert_kept(more, "extreme", 0, 1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("case", "row", "crowded"),
    [
        ("moderate", 4 * 64 + 4, 1),
        ("gathered extreme", 0, 1),
        ("even", 4 * (64 + 64 + 32) + 4, 0),
    ],
)
def test_a_crowded_call_keeps_what_its_rows_allow(more, case, row, crowded):
    assert_kept(more, case, row, crowded)


def assert_kept(ranks, case, row, crowded):
    """Twice the mean of rows come to the first rank, where routes are crowded."""
    for me, rank in enumerate(ranks):
        if case != "gathered extreme":
            rows, _ = rows_of(rank[case], me)
            assert rank[case].kept_bytes == rows * row
        assert rank[case].metrics["moe crowded calls"] == crowded
        assert rank[case].metrics["moe calls"] == 1
        if crowded:
            assert rank[case].losses == rank["crowded plain"].losses
    if case == "gathered extreme":
        assert [rank[case].kept_bytes for rank in ranks] == [0, 0]
