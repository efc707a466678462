"""Several listeners hear of megatron-core's timers, timers that were there go on, and nothing stays."""

import copy
from types import SimpleNamespace

import pytest

from mindspeed_megatron.timer_events import TimerEvents, listening


class Heard:
    """Remembers what it hears."""

    def __init__(self, log, name="a"):
        self.log, self.name = log, name

    def timer_started(self, name, level, barrier):
        self.log.append((self.name, "start", name, level, barrier))

    def timer_stopped(self, name, barrier):
        self.log.append((self.name, "stop", name))


class Timer:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def start(self, barrier=False):
        self.log.append(("below", "start", self.name, barrier))

    def stop(self, barrier=False):
        self.log.append(("below", "stop", self.name))

    def elapsed(self):
        return 7


class Timers:
    """Stands in for the timers of Megatron-LM's scripts."""

    steps = 3

    def __init__(self, log):
        self.log = log

    def __call__(self, name, log_level=None):
        return Timer(self.log, name)


def run_of(timers=None, optimizer_timers=None):
    config, other = SimpleNamespace(timers=timers), SimpleNamespace(timers=optimizer_timers)
    part = SimpleNamespace(config=other)
    optimizer = SimpleNamespace(config=other, chained_optimizers=[part, SimpleNamespace()])
    wrapped = SimpleNamespace(module=SimpleNamespace(config=config))
    return SimpleNamespace(config=config, model=[wrapped], optimizer=optimizer)


def test_what_megatron_core_times_is_heard_of_model_and_optimizer():
    log, run = [], run_of()
    with listening(run, Heard(log)):
        run.config.timers("forward-compute", log_level=2).start()
        run.optimizer.config.timers("optimizer-inner-step", log_level=1).start(barrier=True)
        run.optimizer.config.timers("optimizer-inner-step").stop()
        run.config.timers("forward-compute").stop()
    assert log == [
        ("a", "start", "forward-compute", 2, False),
        ("a", "start", "optimizer-inner-step", 1, True),
        ("a", "stop", "optimizer-inner-step"),
        ("a", "stop", "forward-compute"),
    ]


def test_without_listeners_nothing_is_there():
    run = run_of()
    with listening(run, Heard([])):
        assert isinstance(run.config.timers, TimerEvents)
        assert run.config.timers is run.optimizer.config.timers
    assert run.config.timers is None
    assert run.optimizer.config.timers is None


def test_listeners_share_one_distributor_and_end_in_the_opposite_order():
    log, run = [], run_of()
    with listening(run, Heard(log, "a")):
        events = run.config.timers
        with listening(run, Heard(log, "b")):
            assert run.config.timers is events
            run.config.timers("x", log_level=1).start()
            run.config.timers("x").stop()
        run.config.timers("y", log_level=1).start()
    assert [entry[:3] for entry in log] == [
        *(("a", "start", "x"), ("b", "start", "x")),
        *(("b", "stop", "x"), ("a", "stop", "x")),
        ("a", "start", "y"),
    ]
    assert run.config.timers is None


def test_the_timers_of_a_script_go_on_below_and_come_back():
    log = []
    timers = Timers(log)
    run = run_of(timers, timers)
    with listening(run, Heard(log)):
        timer = run.config.timers("x", log_level=1)
        timer.start(barrier=True)
        timer.stop()
        assert timer.elapsed() == 7
        assert run.config.timers.steps == 3
    assert [entry[0] for entry in log] == ["below", "a", "a", "below"]
    assert log[0] == ("below", "start", "x", True)
    assert run.config.timers is timers
    assert run.optimizer.config.timers is timers


def test_a_step_that_fails_leaves_nothing():
    run = run_of()
    with pytest.raises(ValueError, match="broken"), listening(run, Heard([])):
        raise ValueError("broken")
    assert run.config.timers is None


def test_timers_that_another_put_there_meanwhile_are_left_alone():
    run, others = run_of(), Timers([])
    with listening(run, Heard([])):
        run.config.timers = others
    assert run.config.timers is others


def test_an_optimizer_or_model_without_timers_is_no_obstacle():
    run = SimpleNamespace(config=None, model=[SimpleNamespace()], optimizer=SimpleNamespace())
    with listening(run, Heard([])):
        pass


def test_a_configuration_can_be_copied_meanwhile():
    run = run_of()
    with listening(run, Heard([])):
        assert isinstance(copy.deepcopy(run.config).timers, TimerEvents)
