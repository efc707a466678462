"""Copies of hot experts: rows of ranks as planned, and no trace of copies among the parameters."""

import pytest

from mindspeed_moe.features.expert_map_proofs import EIGHT, HOT
from mindspeed_moe.features.proofs import EP2
from mindspeed_testing.worlds import run_world


@pytest.fixture(scope="module")
def ranks():
    return run_world("copied_experts:one_step", 2, (*EIGHT, *EP2, *HOT))


def test_ranks_compute_as_many_rows_as_planned(ranks):
    for planned, computed, _, _ in ranks:
        assert computed == [after for _, after in planned]
    for call, (before, after) in enumerate(ranks[0][0]):
        other_before, other_after = ranks[1][0][call]
        assert before + other_before == after + other_after
        assert max(after, other_after) < max(before, other_before)


def test_copies_are_no_part_of_the_model(ranks):
    for _, _, names, elements in ranks:
        experts = [name for name in names if ".experts." in name and "extra" not in name]
        assert {name.rsplit(".", 1)[1] for name in experts} == {"weight1", "weight2"}
        # Two layers, four experts each, 64 wide beside 2 x 32 and 32.
        assert elements == pytest.approx(2 * 4 * 64 * 96, rel=0.01)
