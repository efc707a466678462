"""Accepted scripts at their full size and world: one rank of each planned in a dry run."""

import plans
import pytest
from verdicts import BAD

from mindspeed_tune.warm_process import WarmProcess

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def process():
    with WarmProcess("fake", 1, plans.LIMIT) as process:
        yield process


@pytest.mark.parametrize("one", plans.plannable(), ids=lambda one: f"{one.script.source}:{one.script.name}")
def test_one_rank_of_the_script_is_planned(one, process):
    made = plans.plan(one, process, "0")
    assert plans.outcome_of(made)["verdict"] != BAD
    assert made.kinds[0].record.layout.world_size == one.world_size
