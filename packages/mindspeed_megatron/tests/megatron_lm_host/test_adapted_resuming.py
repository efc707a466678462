"""Models and schedules of checkpoints in a Megatron-LM script, compared with features and without."""

import fake_training as fake
import pytest

from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

MODEL = ("--platform", "cpu", "--position-embedding-type", "rope", "--train-iters", "10")
CONSTANT = ("--lr", "6e-4", "--lr-decay-style", "constant")
COSINE = ("--lr", "1e-4", "--min-lr", "1e-5", "--lr-decay-style", "cosine")
TAKE_FLAGS, TAKE_CHECKPOINT = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"
COMPARE = "--no-use-checkpoint-opt-param-scheduler"
RUNS = {
    "same": CONSTANT,
    "override": (*COSINE, TAKE_FLAGS),
    "epsilon": (*CONSTANT, "--norm-epsilon", "1e-2"),
    "heads": (*CONSTANT, "--num-attention-heads", "8"),
    "rotary": (*CONSTANT, "--rotary-base", "500", "--rotary-interleaved"),
    "allowed": (*CONSTANT, "--rotary-base", "500", "--allow-other-model", "rotary_base"),
    "betas": (*CONSTANT, "--adam-beta2", "0.9", COMPARE),
    "no optimizer": (*CONSTANT, "--no-load-optim", COMPARE),
    "contradiction": (*CONSTANT, "--no-load-optim", TAKE_CHECKPOINT),
}


class Rates(fake.ForTests):
    """Remembers the learning rate after each update."""

    name = "rates"
    flags = (fake.Flag("--rates", help="Remember."),)

    @fake.hookimpl(wrapper=True)
    def train_step(self, run):
        result = yield
        rates.append(run.optimizer.param_groups[0]["lr"])
        return result


rates = []


def resumed(folder):
    fake.adapt(Rates)
    fake.run_script(*MODEL, *CONSTANT, "--save", folder, "--save-interval", "5", "--exit-interval", "5")
    fake.forget_run()
    found = {}
    for name, flags in RUNS.items():
        rates.clear()
        # Half of them without any feature.
        asked = ("--rates",) if name in ("same", "override") else ()
        result = fake.run_script(*MODEL, *flags, *asked, "--load", folder)
        found[name] = {**result, "rates": list(rates)}
        fake.forget_run()
    pretrained = (*CONSTANT, "--pretrained-checkpoint", folder, "--rotary-base", "500")
    found["pretrained"] = fake.run_script(*MODEL, *pretrained)
    fake.forget_run()
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return run_world(resumed, 1, str(tmp_path_factory.mktemp("resumed")))[0]


def test_the_same_model_and_schedule_go_on(runs):
    assert runs["same"]["status"] == 0
    assert runs["same"]["rates"] == [6e-4] * 5
    assert "trained otherwise" not in runs["same"]["out"]


def test_an_overridden_schedule_is_that_of_the_flags(runs):
    expected = [4.109e-5, 2.855e-5, 1.859e-5, 1.220e-5, 1.000e-5]
    assert runs["override"]["rates"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("epsilon", "--norm-epsilon 1e-05 (checkpoint) / 0.01 (this run)"),
        ("heads", "--num-attention-heads 4 (checkpoint) / 8 (this run)"),
        ("rotary", "rotary_interleaved False (checkpoint) / True (this run)"),
        ("pretrained", "--rotary-base 10000 (checkpoint) / 500 (this run)"),
        ("betas", "--adam-beta2 0.999 (checkpoint) / 0.9 (this run)"),
        ("contradiction", "--no-load-optim"),
    ],
)
def test_what_differs_is_refused_with_both_values(runs, name, words):
    assert runs[name]["status"] == 1
    assert words in runs[name]["err"]


def test_a_field_that_may_differ_is_said(runs):
    assert runs["allowed"]["status"] == 0
    assert "loaded into another model (--allow-other-model): --rotary-base 10000" in runs["allowed"]["out"]


def test_a_schedule_that_starts_anew_is_said(runs):
    assert runs["no optimizer"]["status"] == 0
    assert "--no-load-optim: the schedule of --load" in runs["no optimizer"]["out"]
