"""Optimizers and schedules of features inside Megatron-LM's loop: by name, and resumed exactly."""

import fake_training as fake
import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_toy_needs.features import Polynomial, UpdateRules
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", "--train-iters", "5", "--lr-warmup-iters", "1", "--min-lr", "1e-3")
SHARDED = ("--use-distributed-optimizer",)
SCHEDULE = ("--lr-decay-style", "toy-polynomial", "--toy-power", "3")
COURSES = {
    "int8, sharded": ("--optimizer", "toy-int8", *SHARDED),
    "averaging, sharded": ("--optimizer", "toy-averaged", *SHARDED, "--bf16"),
    "lion, whole": ("--optimizer", "toy-lion"),
    "a schedule": SCHEDULE,
    "both": (*SCHEDULE, "--optimizer", "toy-lion", *SHARDED),
}


seen = []
"""The flags that `Rates` saw in each step."""


class Rates(Polynomial):
    """Logs the learning rate, and what features see of the flags."""

    name = "rates"
    flags = ()

    @classmethod
    def enabled(cls, args):
        return True

    @hookimpl(wrapper=True)
    def build_scheduler(self):
        return (yield)

    @hookimpl(wrapper=True)
    def log_step(self, run):
        numbers = yield
        seen.append((run.args.optimizer, run.args.lr_decay_style))
        return {**numbers, "rate": run.optimizer.param_groups[0]["lr"]}


class Forgetful(UpdateRules):
    """Brings optimizers, and leaves Adam in place."""

    name = "forgetful"

    @hookimpl(wrapper=True)
    def build_optimizer(self):
        return (yield)


def train_all(folder, names):
    adaptor = fake.adapt(UpdateRules, Polynomial, Rates)
    found = {"seen": {}}
    for index, (name, flags) in enumerate(COURSES.items()):
        if name not in names:
            continue
        place = f"{folder}/{index}"
        save = ("--save", place, "--save-interval", "2", "--exit-interval", "2")
        logs = []
        for more in ((), save, ("--load", place)):
            logs.append(lines(fake.run_script(*LOCAL, *flags, *more)["log"]))
            fake.forget_run()
        found[name] = logs
        found["seen"][name] = seen[-1]
    adaptor.uninstall()
    adaptor = fake.adapt(Forgetful)
    try:
        fake.run_script(*LOCAL, "--optimizer", "toy-lion")
    except Exception as error:
        found["forgotten"] = str(error)
    return found


def lines(log):
    return [line for line in log if "rate" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, asked_for):
    folder, names = str(tmp_path_factory.mktemp("runs")), {"lion, whole", "both", *asked_for("name")}
    return run_world(f"{__name__}:train_all", 2, folder, names, timeout=200)[0]


@pytest.mark.parametrize("name", COURSES)
def test_a_resumed_run_goes_on_exactly(trained, name):
    whole, part, rest = trained[name]
    assert [*part, *rest] == whole
    assert len(whole) == 5


def test_features_see_the_flags_as_they_were_given(trained):
    assert trained["seen"]["both"] == ("toy-lion", "toy-polynomial")
    assert trained["seen"]["lion, whole"] == ("toy-lion", "linear")


@pytest.mark.parametrize("name", ["a schedule", "both"])
def test_the_learning_rate_follows_the_function(trained, name):
    rates = [line["rate"] for line in trained[name][0]]
    expected = [1e-2, *(1e-3 + 9e-3 * (1 - step / 4) ** 3 for step in (1, 2, 3, 4))]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_a_feature_that_leaves_adam_in_place_is_named(trained):
    assert "--optimizer toy-lion: forgetful brings it" in trained["forgotten"]
