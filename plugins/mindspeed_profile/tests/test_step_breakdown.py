"""Every moment of a step counts once, inner parts first, and nothing is watched after it."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist

from mindspeed_core.platforms.streams import HostEvent
from mindspeed_profile.step_clock import (
    COMPUTE,
    DATA,
    GRADIENTS,
    OPTIMIZER,
    StepClock,
    lines,
    part_of_timer,
    spread,
)
from mindspeed_testing import run_world


class Platform:
    """Events with a clock that tests move."""

    now = 0.0

    def event(self, enable_timing=False):
        return Event(self)

    def synchronize(self):
        pass


class Event(HostEvent):
    def __init__(self, platform):
        super().__init__(enable_timing=True)
        self._platform = platform

    def record(self, stream=None):
        self._seconds = self._platform.now


class Nothing:
    config, model, optimizer = None, (), None


class Call:
    def __init__(self, group, size=2):
        self.group, self.ranks = group, tuple(range(size))


class Events:
    """Hears of no communication."""

    def listening(self, listener, at_close):
        return nullcontext()


class Session:
    at_close = None

    def state(self, record):
        return Events()


@pytest.fixture
def clock():
    return StepClock(Platform())


def passing(clock, seconds):
    clock._platform.now += seconds


def test_the_inner_part_counts_and_all_parts_add_up(clock):
    with clock.step(Session(), Nothing()):
        passing(clock, 1)
        with clock.part(OPTIMIZER):
            passing(clock, 2)
            clock.wait_started(Call("DP"))
            passing(clock, 4)
            clock.wait_stopped(Call("DP"))
            passing(clock, 8)
        with clock.part(DATA):
            passing(clock, 16)
    found = {name: one["max"] / 1e3 for name, one in clock.report().items()}
    assert found == {COMPUTE: 1, OPTIMIZER: 10, "waiting DP": 4, DATA: 16}


def test_times_are_of_one_step(clock):
    for _ in range(2):
        with clock.step(Session(), Nothing()):
            passing(clock, 3)
    assert clock.report()[COMPUTE]["min"] == pytest.approx(3e3)
    assert clock.report() == {}


def test_groups_of_one_rank_and_times_between_steps_do_not_count(clock):
    clock.wait_started(Call("DP"))
    passing(clock, 5)
    clock.wait_stopped(Call("DP"))
    with clock.part(DATA):
        passing(clock, 5)
    with clock.step(Session(), Nothing()):
        clock.wait_started(Call("TP", size=1))
        passing(clock, 1)
        clock.wait_stopped(Call("TP", size=1))
    assert set(clock.report()) == {COMPUTE}


def test_a_step_that_fails_does_not_count_and_the_next_one_does(clock):
    with pytest.raises(ValueError, match="broken"), clock.step(Session(), Nothing()), clock.part(DATA):
        raise ValueError("broken")
    with clock.step(Session(), Nothing()):
        passing(clock, 1)
    assert clock.report()[COMPUTE]["max"] == pytest.approx(1e3)


@pytest.mark.parametrize(
    ("timer", "part"),
    [
        ("optimizer-inner-step", OPTIMIZER),
        ("params-all-gather", OPTIMIZER),
        ("all-grads-sync", GRADIENTS),
        ("embedding-grads-all-reduce", GRADIENTS),
        ("batch-generator", DATA),
        ("forward-compute", ""),
        ("forward-recv", ""),
    ],
)
def test_timers_of_megatron_core_are_parts(timer, part):
    assert part_of_timer(timer) == part


def test_a_rank_without_a_part_has_least_of_it():
    assert spread([{COMPUTE: 2.0, "waiting PP": 1.0}, {COMPUTE: 3.0}]) == {
        COMPUTE: {"min": 2.0, "max": 3.0},
        "waiting PP": {"min": 0.0, "max": 1.0},
    }
    assert lines({COMPUTE: {"min": 2.0, "max": 3.0}})[1].split() == ["compute", "2.00", "to", "3.00"]


@pytest.fixture(scope="module")
def two():
    pp2 = ("--pipeline-model-parallel-size", "2", "--log-step-breakdown")
    return run_world("test_step_breakdown:train_and_look_after_it", 2, pp2)[0]


def train_and_look_after_it(flags):
    from profiled_run import train_once

    before = dist.Work.wait, dist.isend
    found = train_once(flags)
    return found["numbers"][-1]["step_breakdown_ms"], (dist.Work.wait, dist.isend) == before


def test_a_pipeline_waits_for_its_transfers(two):
    found, restored = two
    assert found["waiting PIPELINE_MODEL_PARALLEL_GROUP"]["max"] > 0
    assert {COMPUTE, DATA, OPTIMIZER, GRADIENTS} <= set(found)
    assert restored
