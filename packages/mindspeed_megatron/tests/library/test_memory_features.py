"""Features of memory in a loop of one's own: it trains, to the bit, what the standalone host trains."""

import pytest
from own_loop import both

from mindspeed_testing import run_world

# The loop reduces gradients in the type of the model.
HALF = ("--bf16", "--grad-reduce-in-bf16")
PP2 = ("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1")
BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
SMALL = ("--compress-min-elements", "256")

ALONE = {
    "released gradients": (HALF, ("--release-fp32-grad",)),
    "moments on the host": (HALF, ("--virtual-optimizer", "all")),
    "compressed moments": (HALF, ("--compress-optimizer",)),
    "compressed layers": (HALF, ("--compress-activation", "0", *SMALL)),
    "compressed products": (HALF, ("--compress-dense", "level1", *SMALL)),
    "dense layers with biases": (("--recompute-granularity", "selective", "--recompute-modules", "mlp"), ()),
    "modules computed again by name": ((), ("--recompute-plan", "decoder.layers.{0-1}.mlp")),
    "modules swapped by name": (
        (),
        ("--swap-activation-plan", "decoder.layers.{0-2}", "--swap-min-bytes", "256"),
    ),
    "growing segments": ((), ("--memory-fragmentation",)),
    "a report": ((), ("--memory-report",)),
}
LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion")
FLASH = ("--use-fused-rmsnorm", "--use-flash-attn")
SWAPPED = ("--swap-attention", "--swap-min-bytes", "256")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
STAGES = ("--pipeline-model-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer",)
EXPERTS = (
    *("--num-layers", "2", "--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-router-topk", "2"),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
    *("--disable-bias-linear", "--swiglu"),
)
TOGETHER = {
    "parts computed again, state on the host": (SHARDED, ("--recompute-norm", "--swap-optimizer")),
    "computed again in advance": ((*PP2, *BLOCK), ("--recompute-in-advance",)),
    "computed again in the bubble": (PP2, ("--recompute-in-bubble",)),
}
FOUR = {
    "swapped attention, activations computed again": (
        (*TP2, *STAGES, *LLAMA),
        (*FLASH, *SWAPPED, "--recompute-activation-function"),
    ),
    "swapped attention, a zero-bubble schedule": (
        (*STAGES, *SHARDED, *LLAMA),
        (*FLASH, *SWAPPED, "--pipeline-schedule", "zb-h1"),
    ),
    "computed again in the bubble, state on the host": (
        (*PP2, *SHARDED),
        ("--recompute-in-bubble", "--swap-optimizer"),
    ),
    "norms computed again, compressed state": (
        (*TP2, *HALF, *SHARDED),
        ("--recompute-norm", "--compress-optimizer"),
    ),
    "experts, modules computed again by name": (
        (*EXPERTS, *STAGES),
        ("--moe-alltoall-overlap-comm", "--recompute-plan", "decoder.layers.*.mlp"),
    ),
    "experts, rows sent again, swapped attention": (
        (*EXPERTS, *TP2, "--normalization", "RMSNorm"),
        ("--moe-alltoall-overlap-comm", "--moe-zero-memory", "level1", *FLASH, *SWAPPED),
    ),
    "experts, crowded calls, norms computed again": (
        EXPERTS,
        (
            *("--moe-adaptive-recompute-activation", "--moe-adaptive-recompute-activation-scale", "0.4"),
            "--recompute-norm",
        ),
    ),
}
"""Two features of memory on four ranks."""


def train_all(cases, folder):
    return {
        name: both(model, (*features, "--memory-report-path", folder) if name == "a report" else features)
        for name, (model, features) in cases.items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    results = {name: [found] for name, found in run_world(train_all, 1, ALONE, str(folder))[0].items()}
    for rank in run_world(train_all, 2, TOGETHER, str(folder)):
        for name, found in rank.items():
            results.setdefault(name, []).append(found)
    return results, folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*ALONE, *TOGETHER])
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    for expected, losses, *_ in trained[0][name]:
        assert losses == expected
        assert len(set(losses)) == len(losses)


@pytest.mark.thorough
def test_layers_were_computed_again_early(trained):
    for name in ("computed again in advance", "computed again in the bubble"):
        numbers = trained[0][name][0][3]
        assert any(step.get("early recomputations") for step in numbers)


@pytest.mark.thorough
def test_the_second_step_was_reported(trained):
    assert {path.suffix for path in trained[1].iterdir()} == {".json", ".svg", ".pickle"}


@pytest.fixture(scope="module")
def on_four(asked_for):
    asked = asked_for("pair")
    cases = {pair: found for pair, found in FOUR.items() if pair in asked}
    return run_world(train_all, 4, cases, "", timeout=280)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", FOUR)
def test_two_features_on_four_ranks_train_what_the_standalone_host_trains(on_four, pair):
    for rank in on_four:
        expected, losses, *_ = rank[pair]
        assert losses == expected
        assert len(set(losses)) == len(losses)
