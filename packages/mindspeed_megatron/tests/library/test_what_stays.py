"""A loop of one's own leaves no model alive behind its session, also where backward failed."""

import gc
import weakref
from contextlib import nullcontext

import pytest
from megatron.core.utils import unwrap_model
from own_loop import STEPS, OwnLoop, described, of_the_batches, recorded

from mindspeed_core import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing import run_world

LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion")
EXPERTS = (
    *("--num-layers", "2", "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm", "--disable-bias-linear", "--swiglu"),
)
SWAPPED = ("--use-flash-attn", "--swap-attention", "--swap-min-bytes", "1")
CASES = {
    "experts": (EXPERTS, ()),
    "experts that keep less": (EXPERTS, ("--moe-zero-memory", "level1")),
    "parts computed again": (LLAMA, ("--recompute-norm", "--recompute-activation-function")),
    "swapped attention": (LLAMA, SWAPPED),
    "smart swap": (LLAMA, ("--smart-swap", "--swap-min-bytes", "1")),
}
LATER = ("experts that keep less", "smart swap")


def fail(gradient):
    raise RuntimeError("planted in backward")


def trained(memory, args, configs, features, *, fails):
    """Train with a session that ends here; return weak references to what there was."""
    line = [*of_the_batches(args), *features]
    session = activate(line, platform="cpu", configs=configs)
    own = OwnLoop(session, configs, memory, args)
    alive = {"model": own.chunks[0], "optimizer": own.optimizer, "session": session}
    alive = {name: weakref.ref(one) for name, one in alive.items()}
    if fails:
        layer = unwrap_model(own.chunks)[0].decoder.layers[1]
        layer.register_forward_hook(lambda module, given, output: output[0].register_hook(fail) and None)
    batches = memory.batches[0]
    per_step = len(batches) // STEPS
    with pytest.raises(RuntimeError, match="planted") if fails else nullcontext(), session:
        for step in range(STEPS):
            own.step([batches[step * per_step : (step + 1) * per_step]], args)
    return alive


def left(cases):
    found = {}
    for case in cases:
        model, features = CASES[case]
        with recorded(*model) as (memory, run):
            args = run.args
        _, configs = described(*model)
        for fails in (False, True):
            alive = trained(memory, args, configs, features, fails=fails)
            # torch's own objects come back to life once, where Python finds a circle of theirs.
            for _ in range(3):
                gc.collect()
            found[case, fails] = [name for name, one in alive.items() if one() is not None]
        destroy_megatron_state()
    return found


@pytest.fixture(scope="module")
def alive(asked_for):
    return run_world(left, 1, [case for case in CASES if case in asked_for("case")], timeout=240)[0]


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.thorough) if case in LATER else case for case in CASES]
)
def test_nothing_is_alive_after_the_session(alive, case, fails):
    assert alive[case, fails] == []
