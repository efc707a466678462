"""Tensor parallelism of mindspeed-tp in Megatron-LM's scripts trains as one process does."""

import fake_training as fake
import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_tp.features import DECLARATIONS

MODEL = (
    *("--platform", "cpu", "--use-cpu-initialization", "--disable-bias-linear", "--swiglu"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope"),
)
TP2 = ("--tensor-model-parallel-size", "2")
SP = (*TP2, "--sequence-parallel")
RECOMPUTED = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    *("--optimize-recomp-communication-level", "2"),
)
KINDS = {
    "in parts": (*SP, "--use-ascend-coc", "--coc-parallel-num", "2"),
    "fused": (*SP, "--use-ascend-mc2"),
    "grid": (*TP2, "--tp-2d", "--tp-x", "1", "--tp-y", "2"),
    "chunked loss": (*SP, "--lm-loss-chunks", "4"),
    "with masks": (*SP, "--embedding-with-masks"),
    "recomputed": (*SP, *RECOMPUTED),
    "a recomputed grid": (*TP2, "--tp-2d", "--tp-x", "1", "--tp-y", "2", *RECOMPUTED),
    "uneven": (*SP, "--unaligned-linear"),
}


class Norms:
    """The gradient norm of each step."""

    def __init__(self):
        self.seen = []

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        update = yield
        self.seen.append(update.grad_norm)
        return update


def train(kinds):
    found = {}
    for name, flags in kinds.items():
        norms = Norms()
        fake.adapt(*DECLARATIONS, extra=(norms,))
        ran = fake.run_script(*MODEL, *flags)
        found[name] = [line["lm loss"] for line in ran["log"] if "lm loss" in line], norms.seen, ran["err"]
        fake.forget_run()
    return found


@pytest.fixture(scope="module")
def trained():
    return run_world(train, 1, {"plain": ()})[0]["plain"], run_world(train, 2, KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_as_one_process(trained, kind):
    (losses, norms, errors), ranks = trained
    assert len(norms) == 3, errors
    for rank in ranks:
        assert rank[kind][0] == pytest.approx(losses, rel=1e-5), rank[kind][2]
        assert rank[kind][1] == pytest.approx(norms, rel=1e-4)


HEADS5 = ("--num-attention-heads", "5", "--hidden-size", "40")


def test_five_heads_on_two_ranks_learn_as_one_process():
    (alone,) = run_world(train, 1, {"heads": HEADS5})
    losses, norms, errors = alone["heads"]
    assert len(norms) == 3, errors
    for rank in run_world(train, 2, {"heads": (*HEADS5, *SP, "--unaligned-linear")}):
        assert rank["heads"][0] == pytest.approx(losses, rel=1e-5), rank["heads"][2]
        assert rank["heads"][1] == pytest.approx(norms, rel=1e-4)
