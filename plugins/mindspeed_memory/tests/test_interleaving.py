"""The order of passes of the interleaved schedule, and which of them drop what they compute."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from mindspeed_memory.recompute.interleaving import (
    Pass,
    backwards,
    events,
    most_alive,
    passes_to_drop,
    received,
    warmup_passes,
)


def order_of(ranks, rank, chunks, microbatches, group=None):
    table = get_schedule_table(microbatches, chunks, group or ranks)
    return events(table, chunks, warmup_passes(ranks, rank, chunks, group or ranks, len(table)))


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.integers(2, 4), st.integers(1, 8), st.data())
def test_no_rank_keeps_more_passes_than_allowed_and_none_drops_in_vain(ranks, chunks, groups, data):
    rank = data.draw(st.integers(0, ranks - 1))
    order = order_of(ranks, rank, chunks, ranks * groups)
    limit = ranks * chunks
    dropped = passes_to_drop(order, limit)
    assert most_alive(order, dropped) == min(most_alive(order), limit)
    assert bool(dropped) == (most_alive(order) > limit)
    assert {one.chunk for one in dropped} <= {0}


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "alive", "kept", "again"),
    [
        (2, 2, 4, [5, 3], [4, 3], 1),
        (4, 2, 8, [11, 9, 7, 5], [8, 8, 7, 5], 3),
        (4, 2, 32, [11, 9, 7, 5], [8, 8, 7, 5], 15),
        (8, 4, 64, list(range(39, 23, -2)), [32, 32, 32, 32, 31, 29, 27, 25], 28),
    ],
)
def test_passes_alive_and_computed_again_are_those_of_the_page(
    ranks, chunks, microbatches, alive, kept, again
):
    orders = [order_of(ranks, rank, chunks, microbatches) for rank in range(ranks)]
    dropped = [passes_to_drop(order, ranks * chunks) for order in orders]
    assert [most_alive(order) for order in orders] == alive
    assert [most_alive(order, drops) for order, drops in zip(orders, dropped)] == kept
    assert len(dropped[0]) == again


@pytest.mark.parametrize("group", [2, 3, 5])
def test_groups_of_other_sizes_are_followed(group):
    order = order_of(2, 0, 2, 8, group)
    assert most_alive(order, passes_to_drop(order, 4)) <= 4


def test_every_pass_goes_forward_before_it_goes_backward():
    order = order_of(4, 1, 3, 8)
    places = {event: place for place, event in enumerate(order)}
    assert len(order) == len(places) == 2 * 3 * 8
    assert all(
        places[event._replace(forward=True)] < place for event, place in places.items() if not event.forward
    )


def test_the_last_rank_receives_no_gradient_of_its_last_chunk():
    table = get_schedule_table(4, 2, 2)
    assert received(table, 2, last_rank=False) == backwards(table, 2)
    assert received(table, 2, last_rank=True) == [Pass(0, each) for each in range(4)]
