import itertools

import pytest
from megatron.core.parallel_state import RankGenerator

from mindspeed_tune.layout import Layout
from mindspeed_tune.one_rank_groups import only_own_groups
from mindspeed_tune.rank_lists import ranks_along

ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp", "cp-tp-dp-ep-pp")
TOKENS = ("tp", "pp", "dp", "cp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-cp", "tp-dp")


@pytest.mark.parametrize("order", ORDERS)
def test_groups_of_every_rank_are_megatron_cores(order):
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=2, cp=2, order=order)
    for token, rank in itertools.product(TOKENS, range(24)):
        expected = next(ranks for ranks in generator.get_ranks(token) if rank in ranks)
        mask = generator.get_mask(generator.order, token)
        assert list(ranks_along(generator.ordered_size, mask, rank)) == expected
        assert list(Layout(24, tp=2, cp=2, pp=2, order=order).group(rank, token.split("-"))) == expected


@pytest.mark.parametrize("token", ["ep", "tp", "tp-ep", "tp-ep-pp", "dp"])
def test_groups_of_experts_are_megatron_cores(token):
    generator = RankGenerator(tp=1, ep=4, dp=3, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    layout = Layout(24, tp=2, pp=2, ep=4, etp=1)
    for rank in range(24):
        expected = next(ranks for ranks in generator.get_ranks(token) if rank in ranks)
        assert list(layout.group(rank, token.split("-"), expert=True)) == expected


def test_megatron_core_lists_only_the_groups_of_the_rank_and_then_all_again():
    generator = RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp")
    everybody = generator.get_ranks("tp")
    with only_own_groups(5):
        assert generator.get_ranks("tp") == [[4, 5]]
    assert generator.get_ranks("tp") == everybody


def test_places_and_ranks_are_inverse():
    layout = Layout(48, tp=2, cp=3, pp=2, ep=4, etp=1)
    for expert, rank in itertools.product((False, True), range(48)):
        assert layout.rank(layout.place(rank, expert), expert) == rank


def test_a_layout_says_what_a_world_is_no_multiple_of():
    with pytest.raises(ValueError, match="10 ranks is no multiple of 4"):
        Layout(10, tp=2, pp=2)
    with pytest.raises(ValueError, match="rank 8 is not in a world of 8"):
        Layout(8).place(8)
    assert str(Layout(64, tp=8, pp=2)) == "tp8 pp2 dp4"
    assert str(Layout(1)) == "one rank"
