"""Random schedules: whatever is complete and free of circles is accepted, runs, and never blocks."""

import pytest
from random_schedules import random_schedule

from mindspeed_core.errors import UserError
from mindspeed_pp.channels import stuck
from mindspeed_pp.lint import lint
from mindspeed_pp.schedule import made
from mindspeed_pp.simulator import simulate

FEW = range(40)
MANY = pytest.param(range(40, 1000), marks=pytest.mark.thorough)


@pytest.mark.parametrize("seeds", [FEW, MANY], ids=["few", "many"])
def test_random_schedules_are_sound_and_never_block(seeds):
    blocked = 0
    for seed in seeds:
        schedule = random_schedule(seed)
        findings, course = lint(schedule), simulate(schedule)
        assert course.peaks == pytest.approx(findings.peaks)
        assert max(course.busy) <= course.makespan
        for ahead in (0, 1, 2):
            assert not stuck(schedule, ahead=ahead)
        blocked += bool(stuck(schedule, directed=False))
    # One communicator for both directions blocks most of them.
    assert blocked > len(seeds) / 2


@pytest.mark.parametrize("seed", range(30))
def test_a_schedule_that_lacks_or_repeats_an_action_is_refused(seed):
    schedule = random_schedule(seed)
    orders = [list(order) for order in schedule.orders]
    rank = seed % len(orders)
    at = seed % len(orders[rank])
    action = orders[rank][at]
    without = [*orders[:rank], orders[rank][:at] + orders[rank][at + 1 :], *orders[rank + 1 :]]
    twice = [*orders[:rank], [*orders[rank], action], *orders[rank + 1 :]]
    for changed, times in ((without, 0), (twice, 2)):
        with pytest.raises(UserError, match=f"micro-batch {action.microbatch} comes {times} times"):
            lint(made("changed", schedule.placement, schedule.microbatches, changed))


@pytest.mark.parametrize("seed", range(30))
def test_a_gradient_before_its_forward_pass_is_a_circle(seed):
    schedule = random_schedule(seed)
    orders = [list(order) for order in schedule.orders]
    rank = seed % len(orders)
    backward = next(action for action in orders[rank] if action.op in "AB")
    orders[rank].remove(backward)
    orders[rank].insert(0, backward)
    with pytest.raises(UserError, match=rf"circle: .*rank {rank} waits at item 0"):
        lint(made("circle", schedule.placement, schedule.microbatches, orders))
