"""A run leaves nothing alive behind its session, also where backward failed: no model, no host buffers."""

import gc
import tempfile
import weakref
from contextlib import nullcontext

import pytest

from mindspeed_core.activation import prepare
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.feature import hookimpl
from mindspeed_core.hosts.standalone import loop
from mindspeed_core.megatron.unwrap import unwrap
from mindspeed_core.testing import run_world
from mindspeed_core.testing.model_flags import training_flags

SMALL = (
    *("--global-batch-size", "2", "--num-layers", "3", "--swiglu", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--use-flash-attn", "--hidden-dropout", "0.1"),
)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "2")
SWAP_ALL = ("--swap-min-bytes", "1")
FEATURES = {
    "plain": (),
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
}
FIRST = ("recompute-norm", "recompute-activation", "smart-swap")
LATER = pytest.mark.thorough
STEPS = (0, 2)
"""Steps whose backward pass fails; 0 for none."""


class FailingBackward:
    """Raises in the backward pass of a step, when half of the layers have run."""

    def __init__(self, step):
        self.step, self.now, self.alive = step, 0, {}

    @hookimpl(wrapper=True)
    def start_run(self, run):
        chunk = run.model[0]
        parts = {"model": chunk, "optimizer": run.optimizer, "run": run}
        self.alive = {name: weakref.ref(part) for name, part in parts.items()}
        return (yield)

    @hookimpl(wrapper=True)
    def build_model(self):
        chunks = yield
        unwrap(chunks[0]).decoder.layers[1].register_forward_hook(self.follow)
        return chunks

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


def train(flags, step, folder):
    """Train until a step fails, or three; return weak references to what a run is made of."""
    probe = FailingBackward(step)
    session = prepare(
        training_flags((*SMALL, *flags, "--run-dir", folder), 3),
        host=DEFAULT_HOST,
        platform="cpu",
        extra_plugins=(probe,),
    )
    with pytest.raises(RuntimeError, match="planted") if step else nullcontext():
        with session:
            loop.train(session)
    return {"session": weakref.ref(session), **probe.alive}


def left(features):
    """Return of each feature what is alive after a whole run and after each that failed."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, flags in features.items():
            for step in STEPS:
                references = train(flags, step, folder)
                # torch's own objects come back to life once, where Python finds a circle of theirs.
                for _ in range(3):
                    gc.collect()
                found[name, step] = [what for what, one in references.items() if one() is not None]
    return found


@pytest.fixture(scope="module")
def alive(asked_for):
    """Train the features that this run has tests of."""
    return run_world(left, 1, {name: FEATURES[name] for name in asked_for("feature")}, timeout=280)[0]


@pytest.mark.parametrize(
    "feature", [name if name in FIRST else pytest.param(name, marks=LATER) for name in FEATURES]
)
def test_nothing_is_alive_after_the_session(alive, feature):
    assert {step: alive[feature, step] for step in STEPS} == {step: [] for step in STEPS}
