"""CAdam, averaged weights and quantised moments in Megatron-LM's loop: resumed exactly, and in Adam."""

import fake_training as fake
import pytest

from mindspeed_core.feature import Feature, hookimpl
from mindspeed_memory.features.block_optimizer import BlockOptimizer
from mindspeed_optim.features.cadam import CAdamOptimizer
from mindspeed_optim.features.ema import EmaOptimizer
from mindspeed_optim.features.quant_states import QuantStates
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", "--train-iters", "5", "--lr-warmup-iters", "1", "--min-lr", "1e-3", "--bf16")
SHARDED = ("--use-distributed-optimizer",)
RULES = {
    "cadam": (SHARDED, ("--optimizer", "cadam")),
    "ema": (SHARDED, ("--optimizer-selection", "fused_ema_adamw", "--ema-decay", "0.5")),
    "fp8": (SHARDED, ("--quant-states", "fp8")),
    "cadam, whole": ((), ("--optimizer", "cadam")),
    "ema, whole": ((), ("--optimizer-selection", "fused_ema_adamw", "--ema-decay", "0.5")),
    "bf16, whole": ((), ("--quant-states", "bf16")),
}
THOROUGH = tuple(RULES)[3:]


class Norms(Feature):
    """Logs the norm of gradients, which changes with their last bits."""

    name = "norms"
    family = "tests"
    summary = "For tests."

    @classmethod
    def enabled(cls, args):
        return True

    @hookimpl(wrapper=True)
    def log_step(self, run, result):
        numbers = yield
        groups = run.optimizer.param_groups
        return {**numbers, "norm": result.grad_norm, "averaged": groups[0].get("ema_updates")}


def train_all(folder, names):
    fake.adapt(Norms, BlockOptimizer, CAdamOptimizer, EmaOptimizer, QuantStates)
    found = {}
    for index, name in enumerate(names):
        layout, flags = RULES[name]
        place = f"{folder}/{index}"
        found[name] = {
            "whole": steps(*layout, *flags),
            "first": steps(*layout, *flags, *saving(place)),
            "resumed": steps(*layout, *flags, "--load", place),
            "by Adam": steps(*layout, "--load", place),
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
    names = [name for name in RULES if name in asked_for("rule")]
    return run_world(f"{__name__}:train_all", 2, str(tmp_path_factory.mktemp("runs")), names, timeout=390)[0]


@pytest.mark.parametrize(
    "rule", [pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in RULES]
)
def test_a_checkpoint_goes_on_exactly_and_in_adam(trained, rule):
    found = trained[rule]
    assert len(found["whole"]) == 5
    assert [*found["first"], *found["resumed"]] == found["whole"]
    assert len(found["by Adam"]) == 3
    if "ema" in rule:
        assert [line["averaged"] for line in found["whole"]] == [1, 2, 3, 4, 5]
