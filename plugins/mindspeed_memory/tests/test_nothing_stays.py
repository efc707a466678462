"""A run leaves nothing alive behind its session, also where backward failed: no model, no host buffers."""

import gc
import tempfile
import weakref
from contextlib import nullcontext

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.feature_checks import declared_features
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.feature import hookimpl
from mindspeed_megatron.unwrap import unwrap
from mindspeed_memory.features import DECLARATIONS
from mindspeed_testing import run_world
from mindspeed_testing.model_flags import training_flags
from mindspeed_train import loop

SMALL = (
    *("--global-batch-size", "2", "--num-layers", "3", "--swiglu", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--use-flash-attn", "--hidden-dropout", "0.1"),
)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
HALF = ("--bf16", "--grad-reduce-in-bf16")
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--moe-grouped-gemm"),
    *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear"),
)
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2")
SWAP_ALL = ("--swap-min-bytes", "1")
FEATURES = {
    "plain": (),
    "plain experts": EXPERTS,
    "recompute-activation": ("--recompute-activation-function",),
    "recompute-norm": ("--recompute-norm",),
    "recompute-layers": BLOCK,
    "recompute-dense-mlp": (*SELECTIVE, "mlp"),
    "recompute-plan": ("--recompute-plan", "decoder.layers.{0-1}.mlp"),
    "swap-attention": ("--swap-attention", *SWAP_ALL),
    "swap-layer-input": ("--swap-layer-input", *BLOCK, *SWAP_ALL),
    "swap-activation-plan": ("--swap-activation-plan", "decoder.layers.{0-2}", *SWAP_ALL),
    "smart-swap": ("--smart-swap", *SWAP_ALL),
    "adaptive-recompute": ("--adaptive-recompute-device-swap", "--adaptive-recompute-profiling-step", "5"),
    "adaptive-memory": ("--adaptive-memory-optimization", "--adaptive-recompute-profiling-step", "5"),
    "compress-activation": ("--compress-activation", "0", "--bf16"),
    "compress-dense": ("--compress-dense", "level1", "--bf16"),
    "swap-optimizer": ("--swap-optimizer",),
    "virtual-optimizer": ("--virtual-optimizer", "all"),
    "compress-optimizer": ("--compress-optimizer",),
    "reuse-fp32-param": ("--reuse-fp32-param", *HALF),
    "release-fp32-grad": ("--release-fp32-grad", *HALF),
    "recompute-layers-per-pp-rank": (*BLOCK, "--enable-recompute-layers-per-pp-rank"),
    "memory-fragmentation": ("--memory-fragmentation-pools",),
    "memory-report": ("--memory-report",),
    "checkpoint-activations": ("--checkpoint-activations",),
    "moe-zero-memory": (*EXPERTS, "--moe-zero-memory", "level1"),
    "moe-adaptive-recompute": (*EXPERTS, "--moe-adaptive-recompute-activation"),
    "activations of experts": (*EXPERTS, *SELECTIVE, "moe_act"),
}
CHUNKS = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--num-layers", "4"),
)
PIPELINES = {
    "recompute-in-advance": (*CHUNKS, *BLOCK[:-1], "1", "--recompute-in-advance"),
    "recompute-in-bubble": (*CHUNKS, "--recompute-in-bubble"),
    "nanopipe's operands on the host": (*CHUNKS, "--use-nanopipe", "--use-nanopipe-swap"),
}
FIRST = ("plain experts", "recompute-norm", "recompute-activation", "smart-swap")
LATER = pytest.mark.thorough
STEPS = (0, 2)
"""Steps whose backward pass fails; 0 for none."""


class FailingStep:
    """Raises in the backward pass of a step, when half of the layers have run, or in its update."""

    def __init__(self, step, updates):
        self.step, self.updates, self.now, self.alive = step, updates, 0, {}

    @hookimpl(wrapper=True)
    def start_run(self, run):
        chunk = run.model[0]
        parts = {"model": chunk, "optimizer": run.optimizer, "run": run}
        self.alive = {name: weakref.ref(part) for name, part in parts.items()}
        return (yield)

    @hookimpl(wrapper=True)
    def build_model(self):
        chunks = yield
        if not self.updates:
            unwrap(chunks[0]).decoder.layers[1].register_forward_hook(self.follow)
        return chunks

    @hookimpl(wrapper=True)
    def optimizer_step(self):
        if self.updates and self.now == self.step:
            raise RuntimeError("planted in the update")
        return (yield)

    @hookimpl(wrapper=True)
    def train_step(self):
        self.now += 1
        return (yield)

    def follow(self, module, args, output):
        tensor = output[0] if isinstance(output, tuple) else output
        if self.now == self.step and tensor.requires_grad:
            tensor.register_hook(self.fail)

    def fail(self, gradient):
        raise RuntimeError("planted in backward")


def train(flags, step, folder, updates):
    """Train until a step fails, or three; return weak references to what a run is made of."""
    probe, files = FailingStep(step, updates), ("--run-dir", folder, "--memory-report-path", folder)
    session = prepare(
        training_flags((*SMALL, *flags, *files), 3),
        host=DEFAULT_HOST,
        platform="cpu",
        extra_plugins=(probe,),
    )
    with pytest.raises(RuntimeError, match="planted") if step else nullcontext():
        with session:
            loop.train(session)
    return {"session": weakref.ref(session), **probe.alive}


def left(features, updates=False):
    """Return of each feature what is alive after a whole run and after each that failed."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in features.items():
            for step in STEPS:
                references = train(flags, step, folder, updates)
                # torch's own objects come back to life once, where Python finds a circle of theirs.
                for _ in range(3):
                    gc.collect()
                found[name, step] = [what for what, one in references.items() if one() is not None]
    return found


@pytest.fixture(scope="module")
def alive(asked_for):
    """Train the features that this run has tests of."""
    asked = {name: FEATURES[name] for name in asked_for("feature")}
    return run_world(left, 1, asked, timeout=100 + 30 * len(asked))[0]


@pytest.mark.parametrize(
    "feature", [name if name in FIRST else pytest.param(name, marks=LATER) for name in FEATURES]
)
def test_nothing_is_alive_after_the_session(alive, feature):
    assert {step: alive[feature, step] for step in STEPS} == {step: [] for step in STEPS}


@pytest.mark.thorough
def test_nothing_of_a_pipeline_is_alive_after_the_session():
    # In an update no rank waits for a message of another one that has failed.
    for rank in run_world(left, 2, PIPELINES, True, timeout=280):
        assert rank == {(name, step): [] for name in PIPELINES for step in STEPS}


def test_every_feature_of_memory_is_tried():
    # Without a flag of its own, it is part of those that need it.
    named = {feature.name for feature in declared_features(DECLARATIONS)} - {"block-optimizer"}
    assert named <= FEATURES.keys() | PIPELINES.keys()
