"""Parameters, and the state of features, in a Megatron-LM script."""

import fake_training as fake
import pytest

from mindspeed_core.feature import Flag, hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu")
FLAGS = (
    *LOCAL,
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


class Belonging(fake.ForTests):
    """Keeps a tensor for every parameter, which the values of the parameter determine."""

    name = "belonging"
    flags = (Flag("--belonging", help="Keep state."),)

    def __init__(self):
        self.kept = {}

    def _expected(self, run, value):
        return {p: value(p.detach()) for chunk in run.model for p in chunk.parameters()}

    @hookimpl(wrapper=True)
    def before_save_checkpoint(self, run):
        self.kept = self._expected(run, lambda parameter: 2 * parameter + 1)
        return (yield)

    @hookimpl
    def checkpoint_state(self, run):
        from mindspeed_megatron.feature_state import like_parameters

        self.kept = self.kept or self._expected(run, lambda parameter: 0 * parameter)
        return {self.name: like_parameters(run, self.kept)}

    @hookimpl
    def restore_checkpoint_state(self, run, state):
        from mindspeed_megatron.feature_state import restore_like_parameters

        restore_like_parameters(run, self.kept, state[self.name])

    @hookimpl(wrapper=True)
    def start_run(self, run):
        expected = self._expected(run, lambda parameter: 2 * parameter + 1)
        differing = [int((self.kept[p] != tensor).sum()) for p, tensor in expected.items() if p in self.kept]
        compared.append((len(differing), sum(differing)))
        return (yield)


compared = []


def save_and_load(folder):
    fake.adapt(Belonging, fake.Average)
    model = (*LOCAL, "--swiglu", "--belonging", "--average")
    place = ("--save", folder, "--load", folder)
    first = fake.run_script(*model, *place, "--tensor-model-parallel-size", "2", "--train-iters", "2")
    fake.forget_run()
    second = fake.run_script(*model, "--load", folder, "--train-iters", "3")
    fake.forget_run()
    third = fake.run_script(*model, "--load", folder, "--finetune")
    return compared, first, second, third


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_world(save_and_load, 2, str(tmp_path_factory.mktemp("state")))


def test_state_like_parameters_is_loaded_by_another_layout(runs):
    for found, *_ in runs:
        assert found[0] == (0, 0)
        count, wrong = found[1]
        assert count > 20
        assert wrong == 0


def test_finetuning_loads_the_weights_alone_and_says_so(runs):
    for found, first, second, third in runs:
        assert second["log"][0]["steps counted"] == 3
        assert found[2] == (0, 0)
        assert third["log"][0]["steps counted"] == 1
        assert third["log"][0]["lm loss"] < first["log"][0]["lm loss"]
    out = runs[0][3]["out"]
    assert "mindspeed: --finetune: the state of average, belonging in" in out
