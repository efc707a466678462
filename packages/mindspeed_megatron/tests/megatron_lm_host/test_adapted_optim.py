"""Update rules of mindspeed-optim in Megatron-LM's loop: sharded, resumed exactly, and read by Adam."""

import fake_training as fake
import pytest

from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.feature import Feature, hookimpl
from mindspeed_optim.features import DECLARATIONS
from mindspeed_testing.worlds import run_world
from mindspeed_train import loop as _standalone  # noqa: F401 - preloads what worlds need

LOCAL = ("--platform", "cpu", "--train-iters", "4", "--lr-warmup-iters", "1", "--min-lr", "1e-3")
SHARDED = ("--use-distributed-optimizer",)
RULES = {
    "fused": ("--optimizer", "fused_adam", *SHARDED),
    "muon": ("--optimizer", "muon", "--muon-split-gated"),
    "muon, sharded": ("--optimizer", "dist_muon", "--muon-nesterov", "--bf16"),
}
KINDS = ("AdamW", "FusedAdamW", "Muon")


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
        rule = KINDS.index(type(run.optimizer.chained_optimizers[0].optimizer).__name__)
        sharded = float(run.args.use_distributed_optimizer)
        return {**numbers, "norm": result.grad_norm, "rule": float(rule), "sharded": sharded}


def train_all(folder):
    fake.adapt(Norms, *declared_features(DECLARATIONS))
    found = {}
    for index, (name, flags) in enumerate(RULES.items()):
        place = f"{folder}/{index}"
        save = ("--save", place, "--save-interval", "2", "--exit-interval", "2")
        adam = (*SHARDED, *(("--bf16",) if "--bf16" in flags else ())) if name != "muon" else ()
        found[name] = {
            "whole": steps(*flags),
            "first": steps(*flags, *save),
            "resumed": steps(*flags, "--load", place),
            "by Adam": steps(*adam, "--load", place),
        }
    return found


def steps(*flags):
    log = fake.run_script(*LOCAL, *flags)["log"]
    fake.forget_run()
    return [line for line in log if "norm" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_world(f"{__name__}:train_all", 2, str(tmp_path_factory.mktemp("runs")), timeout=300)[0]


@pytest.mark.parametrize("name", RULES)
def test_a_resumed_run_goes_on_exactly(trained, name):
    runs = trained[name]
    assert [*runs["first"], *runs["resumed"]] == runs["whole"]
    assert len(runs["whole"]) == 4
    assert {line["rule"] for line in runs["whole"]} == {
        KINDS.index("FusedAdamW" if name == "fused" else "Muon")
    }


@pytest.mark.parametrize("name", RULES)
def test_adam_goes_on_from_its_checkpoint(trained, name):
    runs = trained[name]
    assert [line["rule"] for line in runs["by Adam"]] == [KINDS.index("AdamW")] * 2
    # The gradients of the step after the checkpoint are those of the same parameters.
    assert runs["by Adam"][0]["norm"] == runs["whole"][2]["norm"]


def test_the_second_name_of_muon_shards(trained):
    assert trained["muon, sharded"]["whole"][0]["sharded"]
    assert not trained["muon"]["whole"][0]["sharded"]
