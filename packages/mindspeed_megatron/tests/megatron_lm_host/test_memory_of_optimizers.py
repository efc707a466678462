"""Other forms of optimizer state in Megatron-LM's loop: trained as by AdamW, resumed exactly."""

import fake_training as fake
import pytest

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.feature import Feature, hookimpl
from mindspeed_memory.features import OPTIMIZER_FEATURES
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", "--train-iters", "5", "--lr-warmup-iters", "1", "--min-lr", "1e-3", "--bf16")
SHARDED = ("--use-distributed-optimizer",)
REUSE = ("--reuse-fp32-param",)
FORMS = {
    "split": (SHARDED, REUSE),
    "split, whole parameters": ((), REUSE),
    "swapped": (SHARDED, ("--swap-optimizer",)),
    "compressed": (SHARDED, ("--compress-optimizer",)),
    # The script reduces gradients in their own dtype unless it is told otherwise.
    "released": (SHARDED, ("--release-fp32-grad",)),
    "virtual": (SHARDED, ("--virtual-optimizer", "all")),
}
THOROUGH = ("split", "compressed", "released", "virtual")


class Norms(Feature):
    """Logs the norm of gradients, which changes with their last bits."""

    name = "norms"
    family = "tests"
    summary = "For tests."

    @classmethod
    def enabled(cls, args):
        return True

    @hookimpl(wrapper=True)
    def log_step(self, result):
        numbers = yield
        return {**numbers, "norm": result.grad_norm}


def train_all(folder, names):
    fake.adapt(Norms, *declared_features(OPTIMIZER_FEATURES))
    found, plain = {}, {}
    for index, name in enumerate(names):
        layout, flags = FORMS[name]
        place = f"{folder}/{index}"
        if layout not in plain:
            plain[layout] = steps(*layout), f"{place}-adamw"
            steps(*layout, *saving(f"{place}-adamw"))
        whole, adams = plain[layout]
        found[name] = {
            "AdamW": whole,
            "whole": steps(*layout, *flags),
            "first": steps(*layout, *flags, *saving(place)),
            "resumed": steps(*layout, *flags, "--load", place),
            "by AdamW": steps(*layout, "--load", place),
            "from AdamW": steps(*layout, *flags, "--load", adams),
        }
    return found


def saving(folder):
    return ("--save", folder, "--save-interval", "2", "--exit-interval", "2")


def steps(*flags):
    log = fake.run_script(*LOCAL, *flags)["log"]
    fake.forget_run()
    return [line for line in log if "norm" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, asked_for):
    names = [name for name in FORMS if name in asked_for("form")]
    folder = str(tmp_path_factory.mktemp("runs"))
    return run_world(f"{__name__}:train_all", 2, folder, names, timeout=390)[0]


FORM = pytest.mark.parametrize(
    "form", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in FORMS]
)


@FORM
def test_it_trains_as_adamw_does(trained, form):
    assert trained[form]["whole"] == trained[form]["AdamW"]
    assert len(trained[form]["whole"]) == 5


@FORM
@pytest.mark.parametrize("run", ["resumed", "by AdamW", "from AdamW"])
def test_a_checkpoint_goes_on_exactly_with_it_and_with_adamw(trained, form, run):
    assert [*trained[form]["first"], *trained[form][run]] == trained[form]["whole"]
