"""Times and reasons of saves, and the effect of a save that failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_core.errors import CheckpointError
from mindspeed_train.checkpoint.save import Saver
from mindspeed_train.checkpoint.save_policy import SavePolicy
from mindspeed_train.fault_tolerance.stopping import StopControl


class FakeSession:
    """Records every save as ``(step, reason)``; saves and polls fail for the given errors."""

    published = None

    def __init__(self):
        self.saves, self.failing, self.poll_errors = [], set(), []
        self.stop_while_saving = ""
        self.control = StopControl()

    def state(self, record):
        return {Saver: self, StopControl: self.control}[record]

    def poll(self, *, blocking):
        if self.poll_errors:
            raise self.poll_errors.pop()

    def call(self, stage, run, reason=""):
        if stage == "should_stop":
            return self.stop_while_saving
        assert stage == "save_checkpoint"
        self.saves.append((run.iteration, reason))
        if reason in self.failing:
            raise CheckpointError("disk full")
        return SimpleNamespace(path=f"iter_{run.iteration}")


@pytest.fixture
def session():
    return FakeSession()


def begin(session, **flags):
    args = SimpleNamespace(
        **{
            "save": "folder",
            "save_interval": None,
            "on_save_failure": "stop",
            "rampup_batch_size": None,
            "step_batch_size_schedule": None,
            "global_batch_size": 4,
            "micro_batch_size": 1,
            "data_parallel_size": 1,
            "num_microbatches": 4,
            **flags,
        }
    )
    run = SimpleNamespace(session=session, args=args, iteration=0, consumed_train_samples=0)
    run.complete_parameters = lambda: None
    lines = []
    return run, SavePolicy(run, lines.append), lines


def step(run, policy, samples=4, stop=""):
    policy.before_step()
    run.iteration += 1
    run.consumed_train_samples += samples
    return policy.after_step(stop)


def test_a_checkpoint_is_due_every_interval_and_at_the_end(session):
    run, policy, lines = begin(session, save_interval=2)
    for _ in range(5):
        assert step(run, policy) == ""
    policy.at_end("")
    assert session.saves == [(2, "interval"), (4, "interval"), (5, "end")]
    assert lines == ["saved iter_2", "saved iter_4", "saved iter_5"]


def test_a_step_that_is_saved_is_not_saved_again_at_the_end(session):
    run, policy, _ = begin(session, save_interval=1)
    step(run, policy)
    policy.at_end("")
    assert session.saves == [(1, "interval")]


def test_nothing_is_saved_without_a_folder(session):
    run, policy, _ = begin(session, save=None, save_interval=1)
    step(run, policy)
    policy.at_end("")
    assert session.saves == []


def test_the_last_state_of_each_batch_size_is_saved_once(session):
    run, policy, _ = begin(session, rampup_batch_size=[2, 1, 8], save_interval=4)
    for samples in (2, 2, 3, 3, 4):
        step(run, policy, samples)
    # The batch grows after steps 2 and 4.
    assert session.saves == [(2, "rampup"), (4, "interval")]


def test_a_run_that_stops_as_the_batch_grows_saves_once_with_the_reason_of_its_end(session):
    run, policy, _ = begin(session, rampup_batch_size=[2, 2, 2])
    policy.at_end(step(run, policy, 2, stop="--exit-interval 1"))
    assert session.saves == [(1, "exit")]


def test_a_signal_is_the_reason_of_the_last_save(session):
    run, policy, _ = begin(session)
    session.control.agreed_signal = 15
    policy.at_end(step(run, policy, stop="received SIGTERM"))
    assert session.saves == [(1, "signal")]


def test_a_signal_that_comes_while_saving_ends_the_run_at_the_step_that_was_saved(session):
    run, policy, _ = begin(session, save_interval=1)
    session.stop_while_saving = "received SIGTERM"
    assert step(run, policy) == "received SIGTERM"
    policy.at_end("received SIGTERM")
    assert session.saves == [(1, "interval")]


def test_a_failed_save_ends_the_run(session):
    run, policy, _ = begin(session, save_interval=1)
    session.failing = {"interval"}
    with pytest.raises(CheckpointError):
        step(run, policy)


def test_training_goes_on_after_a_failed_save_if_asked_and_the_end_is_saved_again(session):
    run, policy, lines = begin(session, save_interval=1, on_save_failure="continue")
    session.failing = {"interval"}
    assert step(run, policy) == ""
    assert lines == ["not saved after step 1, training goes on: disk full"]
    policy.at_end("")
    assert session.saves == [(1, "interval"), (1, "end")]


def test_the_last_save_is_not_spared(session):
    run, policy, _ = begin(session, on_save_failure="continue")
    step(run, policy)
    session.failing = {"end"}
    with pytest.raises(CheckpointError):
        policy.at_end("")


def test_a_background_save_that_failed_is_reported_once_and_the_next_one_is_made(session):
    run, policy, lines = begin(session, save_interval=1, on_save_failure="continue")
    session.poll_errors = [CheckpointError("writers died")]
    step(run, policy)
    assert lines == ["not saved after step 0, training goes on: writers died", "saved iter_1"]
    session.poll_errors = [CheckpointError("writers died")]
    run.iteration += 1
    policy.at_end("")
    assert session.saves == [(1, "interval"), (2, "end")]


def test_a_background_save_that_failed_ends_the_run(session):
    _, policy, _ = begin(session)
    session.poll_errors = [CheckpointError("writers died")]
    with pytest.raises(CheckpointError):
        policy.before_step()
