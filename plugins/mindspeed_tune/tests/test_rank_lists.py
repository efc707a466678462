import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindspeed_tune.rank_lists import RankList, compressed


# A busy machine draws slowly, which says nothing of the lists.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 400), min_size=1, max_size=60, unique=True))
def test_any_list_keeps_its_ranks_and_their_order(ranks):
    short = compressed(ranks)
    assert list(short) == ranks
    assert len(short) == len(ranks)
    assert all((rank in short) == (rank in ranks) for rank in range(402))
    assert RankList.from_json(short.as_json()) == short
    assert short.last == max(ranks)


@pytest.mark.parametrize(
    ("ranks", "steps"),
    [
        ([5], ()),
        (list(range(8)), ((8, 1),)),
        (list(range(3, 1027, 128)), ((8, 128),)),
        ([a + 128 * b for b in range(4) for a in range(8)], ((8, 1), (4, 128))),
    ],
)
def test_progressions_are_a_few_numbers(ranks, steps):
    assert compressed(ranks).steps == steps
    assert not compressed(ranks).others


def test_a_reader_sees_start_stop_and_stride():
    assert str(compressed(range(8))) == "0:8"
    assert str(compressed(range(0, 1024, 128))) == "0:1024:128"
    nested = compressed([a + 128 * b for b in range(4) for a in range(8)])
    assert str(nested) == "0:8, 128:136, … (4 times, 128 apart)"
    assert str(compressed([3, 1, 2])) == "3, 1, 2"


def test_a_group_crosses_nodes_where_its_ends_are_on_different_ones():
    assert not compressed(range(8)).crosses(8)
    assert compressed(range(4, 12)).crosses(8)
    assert compressed([0, 9]).crosses(8)
    assert not compressed([2, 0, 1]).crosses(8)


def test_no_rank_is_no_group():
    with pytest.raises(ValueError, match="at least one"):
        compressed([])
