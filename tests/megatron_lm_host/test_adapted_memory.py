"""Activations that are computed again, swapped or compressed in Megatron-LM's scripts: the same training."""

import fake_training as fake
import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_core.testing.worlds import run_world
from mindspeed_kernels.features.attention import FlashAttention
from mindspeed_memory.features.activations import ACTIVATION_FEATURES

MODEL = ("--platform", "cpu", "--use-cpu-initialization", "--use-flash-attn", "--attention-dropout", "0")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
SIDES = {
    "parts": ("--recompute-activation-function", "--recompute-norm"),
    "dense": ("--recompute-granularity", "selective", "--recompute-modules", "mlp"),
    "counted": (*BLOCK, "--enable-recompute-layers-per-pp-rank", "--reduce-recompute-for-last-chunk"),
    "attention": ("--swap-attention", "--swap-min-bytes", "256"),
    "inputs": (*BLOCK, "--swap-layer-input", "--swap-min-bytes", "256"),
}
POLICIES = {
    "measured plan": (
        *("--adaptive-recompute-device-size", "100", "--adaptive-recompute-profiling-step", "5"),
        *("--train-iters", "7"),
    ),
    "traced step": ("--smart-swap", "--swap-min-bytes", "256", "--train-iters", "7"),
    "older names": ("--checkpoint-activations", "--checkpoint-policy", "block", "--train-iters", "7"),
}
COMPRESSED = {
    "activations": ("--compress-activation", "0", "--compress-min-elements", "64"),
    "products": ("--compress-dense", "level1", "--compress-min-elements", "64"),
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


def trained(*flags):
    norms = Norms()
    fake.adapt(FlashAttention, *ACTIVATION_FEATURES, extra=(norms,))
    result = fake.run_script(*MODEL, *flags)
    fake.forget_run()
    return [line["lm loss"] for line in result["log"] if "lm loss" in line], norms.seen


def train(*layout):
    found = {name: trained(*layout, *flags) for name, flags in {"plain": (), **SIDES}.items()}
    half = (*layout, "--bf16")
    compressed = {name: trained(*half, *flags) for name, flags in {"plain": (), **COMPRESSED}.items()}
    return found, compressed


def follow():
    plain = trained("--train-iters", "7")
    return plain, {name: trained(*flags) for name, flags in POLICIES.items()}


@pytest.fixture(scope="module")
def policies():
    return run_world(follow, 1)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", POLICIES)
def test_policies_change_nothing(policies, name):
    plain, found = policies
    assert len(plain[1]) == 7
    assert found[name] == plain


@pytest.fixture(scope="module", params=[(), ("--tensor-model-parallel-size", "2", "--sequence-parallel")])
def ranks(request):
    return run_world(train, 2 if request.param else 1, *request.param)


@pytest.mark.parametrize("name", SIDES)
def test_losses_and_norms_are_those_without(ranks, name):
    for found, _ in ranks:
        assert len(found["plain"][1]) == 3
        assert found[name] == found["plain"]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_change_nothing(ranks, name):
    for _, found in ranks:
        assert len(found["plain"][1]) == 3
        assert found[name] == found["plain"]
