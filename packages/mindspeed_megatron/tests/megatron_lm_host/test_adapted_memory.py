"""Activations that are computed again, swapped or compressed in Megatron-LM's scripts: the same training."""

import fake_training as fake
import pytest

from mindspeed_core.feature import hookimpl
from mindspeed_kernels.features.attention import FlashAttention
from mindspeed_memory.features import ACTIVATION_FEATURES
from mindspeed_memory.features.memory_fragmentation import MemoryFragmentation
from mindspeed_memory.features.memory_report import MemoryReport
from mindspeed_testing.worlds import run_world

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
    "measured plan with swaps": (
        *("--adaptive-memory-optimization", "--adaptive-recompute-profiling-step", "5"),
        *("--swap-min-bytes", "256", "--train-iters", "7"),
    ),
    "traced step": ("--smart-swap", "--swap-min-bytes", "256", "--train-iters", "7"),
    "older names": ("--checkpoint-activations", "--checkpoint-policy", "block", "--train-iters", "7"),
    "again by name": ("--recompute-plan", "decoder.layers.{*}.mlp", "--train-iters", "7"),
    "swapped by name": (
        *("--swap-activation-plan", "decoder.layers.{*}.self_attention", "--swap-min-bytes", "256"),
        *("--train-iters", "7"),
    ),
    "growing segments": ("--memory-fragmentation", "--train-iters", "7"),
    "report": ("--memory-report", "--memory-report-path", "{folder}", "--train-iters", "7"),
}
INTERLEAVED = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--num-layers", "4", "--micro-batch-size", "1", "--hidden-dropout", "0.1"),
)
EARLY = {"in advance": (*BLOCK, "--recompute-in-advance"), "in bubble": ("--recompute-in-bubble",)}
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


class OverlappedExchange:
    """Lets stages exchange beside computation, as Megatron-LM does with virtual stages."""

    @hookimpl(wrapper=True)
    def build_transformer_config(self):
        config = yield
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        return config


def trained(*flags, probes=()):
    norms = Norms()
    features = (*ACTIVATION_FEATURES, MemoryFragmentation, MemoryReport)
    fake.adapt(FlashAttention, *features, extra=(norms, *probes))
    result = fake.run_script(*MODEL, *flags)
    fake.forget_run()
    return [line["lm loss"] for line in result["log"] if "lm loss" in line], norms.seen


def train(*layout):
    found = {name: trained(*layout, *flags) for name, flags in {"plain": (), **SIDES}.items()}
    half = (*layout, "--bf16")
    compressed = {name: trained(*half, *flags) for name, flags in {"plain": (), **COMPRESSED}.items()}
    return found, compressed


def follow(folder):
    plain = trained("--train-iters", "7")
    found = {
        name: trained(*(flag.replace("{folder}", folder) for flag in flags))
        for name, flags in POLICIES.items()
    }
    return plain, found


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    return run_world(follow, 1, str(tmp_path_factory.mktemp("report")))[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", POLICIES)
def test_policies_change_nothing(policies, name):
    plain, found = policies
    assert len(plain[1]) == 7
    assert found[name] == plain


def recompute_early():
    probes = (OverlappedExchange(),)
    plain = trained(*INTERLEAVED, probes=probes)
    return plain, {name: trained(*INTERLEAVED, *flags, probes=probes) for name, flags in EARLY.items()}


@pytest.mark.thorough
def test_layers_computed_again_early_change_nothing():
    ranks = run_world(recompute_early, 2)
    for plain, found in ranks:
        assert len(plain[1]) == 3
        assert found == dict.fromkeys(EARLY, plain)
    assert any(losses for (losses, _), _ in ranks)


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
