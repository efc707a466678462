"""Optimizer state gathered in slices: megatron-core's to the bit, handed out again, in calls as stated."""

import pytest
from gathered_cases import gathered

from mindspeed_testing import run_world

BUCKETS = ("--ddp-num-buckets", "3", "--overlap-grad-reduce")


WITHOUT_GLOO = ("--disable-gloo-group",)


@pytest.fixture(
    scope="module",
    params=[WITHOUT_GLOO, pytest.param((), marks=pytest.mark.thorough)],
    ids=["no-gloo", "gloo"],
)
def ranks(request):
    return request.param, run_world(gathered, 2, (*BUCKETS, *request.param))


def test_gathered_state_is_that_of_megatron_core(ranks):
    _, (first, second) = ranks
    assert first["alike"]
    assert first["kept"] == ["exp_avg", "exp_avg_sq", "param"]
    assert second["kept"] == []
    assert first["everywhere"] == second["everywhere"] > 0


def test_handed_out_state_is_what_each_rank_had(ranks):
    flags, found = ranks
    for rank in found:
        assert rank["restored"]
        assert rank["gloo"] == (not flags)


def test_the_number_of_collectives_is_that_of_the_formula(ranks):
    for rank in ranks[1]:
        assert rank["buckets"] > 1
        assert rank["gathers"] == rank["scatters"] == rank["formula"] > 6
