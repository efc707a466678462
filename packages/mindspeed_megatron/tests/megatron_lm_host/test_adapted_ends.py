"""A script of Megatron-LM leaves no model alive behind ``pretrain``, also where backward failed."""

import gc
import weakref
from contextlib import nullcontext

import fake_training as fake
import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_kernels.features.weight_gradients import GroupedExperts
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.features import ACTIVATION_FEATURES
from mindspeed_testing.worlds import run_world

MODEL = ("--platform", "cpu", "--use-cpu-initialization")
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--disable-bias-linear", "--swiglu"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
)
CASES = {
    "experts": EXPERTS,
    "parts computed again": ("--recompute-norm", "--recompute-activation-function"),
}


class Watch:
    """Refers to the run weakly, and raises in backward where it is to."""

    def __init__(self, fails):
        self.fails, self.alive = fails, {}

    @hookimpl(wrapper=True)
    def start_run(self, run):
        self.alive = {"model": weakref.ref(run.model[0]), "run": weakref.ref(run)}
        if self.fails:
            unwrap(run.model[0]).decoder.layers[0].register_forward_hook(self.follow)
        return (yield)

    def follow(self, module, given, output):
        output[0].register_hook(self.fail)

    def fail(self, gradient):
        raise RuntimeError("planted in backward")


def trained(flags, fails):
    watch = Watch(fails)
    fake.adapt(GroupedExperts, *ACTIVATION_FEATURES, extra=(watch,))
    with pytest.raises(RuntimeError, match="planted") if fails else nullcontext():
        fake.run_script(*MODEL, *flags)
    return watch.alive


def left():
    found = {}
    for case, flags in CASES.items():
        for fails in (False, True):
            alive = trained(flags, fails)
            fake.forget_run()
            for _ in range(3):
                gc.collect()
            found[case, fails] = [name for name, one in alive.items() if one() is not None]
    return found


@pytest.fixture(scope="module")
def alive():
    return run_world(left, 1, timeout=240)[0]


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
@pytest.mark.parametrize("case", CASES)
def test_no_model_is_alive_after_the_script(alive, case, fails):
    assert alive[case, fails] == []
