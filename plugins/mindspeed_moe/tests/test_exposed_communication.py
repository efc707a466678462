"""Communication that an overlapped layer waits for, on a clock that moves with its work."""

import sys
from pathlib import Path

import pytest

from mindspeed_testing import run_world

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from moe_layer import RATIOS, TABLE, both_orders


@pytest.fixture(scope="module")
def orders():
    return run_world(both_orders, 2)[0]


@pytest.mark.parametrize("ratio", RATIOS)
def test_what_is_exposed_is_what_the_published_table_says(orders, ratio):
    theirs, ours = orders
    assert (theirs.waited(ratio), ours.waited(ratio)) == pytest.approx(TABLE[ratio], abs=0.01)
    assert theirs.computed == ours.computed
    assert ours.computed / 1e6 == pytest.approx(18.31, abs=0.01)


@pytest.mark.parametrize("ratio", RATIOS)
def test_an_exchange_exposes_no_more_than_its_filler_leaves(orders, ratio):
    _, ours = orders
    there, probs, back, of_back, of_probs, of_there = ours.exposed[ratio]
    # Rows and probabilities of a direction share a communicator, and what is computed meanwhile.
    for together in ((there, probs), (back,), (of_back,), (of_probs, of_there)):
        taken = sum(one.duration for one in together)
        filler = max(one.meanwhile for one in together)
        assert sum(one.waited for one in together) <= max(0.0, taken - filler) + 1e-6
