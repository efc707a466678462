"""Parameters, and the state of features, in a Megatron-LM script."""

import fake_training as fake
import pytest

from mindspeed_core.feature import Flag, hookimpl
from mindspeed_core.hosts.standalone import loop as _standalone  # noqa: F401 - preloads what worlds need
from mindspeed_core.testing.worlds import run_world

FLAGS = (
    "--platform",
    "cpu",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--ddp-bucket-size",
    "5000",
)
OVERLAP = (*FLAGS, "--overlap-param-gather")


class Weighed(fake.ForTests):
    """Sums up the parameters where stages say that they are complete."""

    name = "weighed"
    flags = (Flag("--weighed", type=str, choices=("complete", "unasked"), help="Weigh."),)

    def __init__(self):
        self.found = {}

    def _weigh(self, run, stage):
        parameters = (parameter for chunk in run.model for parameter in chunk.parameters())
        self.found.setdefault(stage, []).append(
            float(sum(p.detach().double().square().sum() for p in parameters))
        )

    @hookimpl(wrapper=True)
    def optimizer_step(self, run):
        result = yield
        if run.args.weighed == "complete":
            run.complete_parameters()
        self._weigh(run, "optimizer_step")
        return result

    @hookimpl(wrapper=True)
    def evaluate(self, run):
        self._weigh(run, "evaluate")
        return (yield)

    @hookimpl(wrapper=True)
    def before_save_checkpoint(self, run):
        self._weigh(run, "before_save_checkpoint")
        return (yield)

    @hookimpl
    def checkpoint_state(self, run):
        self._weigh(run, "checkpoint_state")
        return {}

    @hookimpl(wrapper=True)
    def finish_run(self, run):
        self._weigh(run, "finish_run")
        weighed.append(self.found)
        return (yield)


weighed = []


def weigh_all(folder):
    fake.adapt(Weighed)
    logs = []
    for name, flags in (("plain", FLAGS), ("stale", OVERLAP), ("complete", OVERLAP)):
        how = "complete" if name == "complete" else "unasked"
        save = ("--save", f"{folder}/{name}", "--save-interval", "2", "--eval-interval", "2")
        log = fake.run_script(*flags, *save, "--weighed", how)["log"]
        logs.append([line["lm loss"] for line in log if "lm loss" in line])
        fake.forget_run()
    return dict(zip(("plain", "stale", "complete"), weighed)), logs


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return run_world(weigh_all, 2, str(tmp_path_factory.mktemp("weighed")))


def test_parameters_are_complete_after_an_update_where_a_feature_asks(weights):
    for found, _ in weights:
        assert found["complete"]["optimizer_step"] == found["plain"]["optimizer_step"]
        assert found["stale"]["optimizer_step"] != found["plain"]["optimizer_step"]


@pytest.mark.parametrize("stage", ["evaluate", "before_save_checkpoint", "checkpoint_state", "finish_run"])
def test_stages_that_are_said_to_see_complete_parameters_do(weights, stage):
    for found, _ in weights:
        assert found["stale"][stage] == found["plain"][stage]


def test_the_losses_are_the_same_with_and_without_the_call(weights):
    for _, (plain, stale, complete) in weights:
        assert plain == stale == complete
