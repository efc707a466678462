"""Choices that features add to --lr-decay-style and --optimizer: followed, resumed, and refused in time."""

import pytest
from test_checkpoint_resume import NO_DROPOUT, close_run, error_of, open_run, save, train

from mindspeed_core.errors import SessionError
from mindspeed_core.feature import hookimpl
from mindspeed_core.registry import Registry
from mindspeed_core.session import current
from mindspeed_testing.worlds import run_world
from mindspeed_toy_needs.features import Polynomial, UpdateRules

FLAGS = (*NO_DROPOUT, "--lr-decay-style", "toy-polynomial", "--toy-power", "3")
LINEAR = (*NO_DROPOUT, "--lr-decay-style", "linear")


class Forgetful(Polynomial):
    """Brings a schedule and an optimizer, and does nothing for either."""

    flags = (*Polynomial.flags[:1], *UpdateRules.flags)

    @hookimpl(wrapper=True)
    def build_scheduler(self):
        return (yield)


class Asleep(UpdateRules):
    """Is never active."""

    @classmethod
    def enabled(cls, args):
        return False


class Broken(Polynomial):
    """Returns no number."""

    @hookimpl(wrapper=True)
    def build_scheduler(self, session):
        scheduler = yield
        from mindspeed_core import follow_schedule

        schedules = {"toy-polynomial": lambda point: float("nan")}
        return follow_schedule(session, scheduler, schedules, owner=self.name)


def rate_of(step):
    """Of 8 steps of 4 samples, the first 2 warm up."""
    if step <= 2:
        return 1e-2 * step / 2
    return 1e-3 + (1e-2 - 1e-3) * (1 - (step - 2) / 6) ** 3


def rates(steps):
    return [float.fromhex(rate) for *_, rate in steps]


def schedules(folder):
    def opened(flags, declarations=(Polynomial,)):
        return open_run(flags, registry=Registry.of(declarations))

    def trained(flags, declaration):
        run = opened(flags, (declaration,))
        train(run, 3)
        return run

    def failing(flags, declaration):
        try:
            close_run(opened([*NO_DROPOUT, *flags], (declaration,)))
        except SessionError as error:
            from mindspeed_train import loop

            session = current()
            loop.teardown(session)
            session.close()
            return str(error)

    run = opened([*FLAGS, "--save", folder])
    start = run.optimizer.param_groups[0]["lr"]
    part = train(run, 3)
    save(run)
    rest = train(run, 5)
    behind = train(run, 1)
    close_run(run)
    run = opened([*FLAGS, "--load", folder])
    at_once = run.optimizer.param_groups[0]["lr"]
    resumed = train(run, 5)
    close_run(run)
    run = opened([*LINEAR, "--load", folder, "--override-opt-param-scheduler"])
    other = train(run, 1)
    close_run(run)
    load = ["--load", folder]
    found = {
        "start": start,
        "whole": [*part, *rest],
        "behind": behind,
        "at once": at_once,
        "rest": rest,
        "resumed": resumed,
        "other": other,
        "changed": error_of(lambda: opened([*LINEAR, *load])),
        "unknown": error_of(lambda: opened([*LINEAR, *load, "--use-checkpoint-opt-param-scheduler"])),
        "broken": error_of(lambda: trained(FLAGS, Broken)),
        "asleep": error_of(lambda: opened([*NO_DROPOUT, "--optimizer", "toy-lion"], (Asleep,))),
        "forgotten": failing(("--lr-decay-style", "toy-polynomial"), Forgetful),
    }
    Forgetful.flags = (*UpdateRules.flags,)
    found["left in place"] = failing(("--optimizer", "toy-lion"), Forgetful)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_world(schedules, 1, str(tmp_path_factory.mktemp("schedules")), timeout=200)[0]


def test_the_learning_rate_follows_the_function_between_warm_up_and_end(found):
    assert found["start"] == 0.0
    assert rates(found["whole"]) == pytest.approx([rate_of(step) for step in range(1, 9)], rel=1e-12)
    assert rates(found["behind"]) == [1e-3]


def test_a_resumed_run_follows_it_on(found):
    assert found["at once"] == pytest.approx(rate_of(3), rel=1e-12)
    assert found["resumed"] == found["rest"]


def test_another_schedule_on_resume_is_refused_as_megatron_cores_own_is(found):
    assert "the schedule differs from the flags" in found["changed"]
    assert "--override-opt-param-scheduler" in found["changed"]
    assert rates(found["other"]) == pytest.approx([1e-3 + (1e-2 - 1e-3) * (1 - 2 / 6)])


def test_the_schedule_of_a_checkpoint_that_nobody_here_knows_is_named(found):
    assert "the checkpoint's schedule is 'toy-polynomial'" in found["unknown"]
    assert "give --lr-decay-style toy-polynomial" in found["unknown"]


def test_what_is_no_learning_rate_is_refused(found):
    assert "--lr-decay-style toy-polynomial: its function gives nan" in found["broken"]


def test_a_choice_of_a_feature_that_is_not_active_is_refused(found):
    assert found["asleep"].startswith("--optimizer 'toy-lion': it belongs to toy-update-rules, which is not")
    assert "adam, sgd" in found["asleep"]


def test_a_feature_that_leaves_in_place_what_stood_in_is_named(found):
    assert "toy-polynomial brings it, but leaves the learning rate constant" in found["forgotten"]
    assert "toy-polynomial brings it, but leaves megatron-core's Adam in place" in found["left in place"]
