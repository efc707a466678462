"""Pipeline features of four ranks beside another feature, in a loop of one's own."""

import pytest
from own_loop import STEPS, OwnLoop, both, described, of_the_batches, recorded

from mindspeed_core import activate
from mindspeed_megatron.global_state import destroy_megatron_state
from mindspeed_testing import run_world

STAGES = ("--pipeline-model-parallel-size", "2")
CHUNKS = (*STAGES, "--num-layers-per-virtual-pipeline-stage", "1")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LLAMA = ("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-swiglu-fusion")
SHARDED = ("--use-distributed-optimizer",)
SWAPPED = ("--use-flash-attn", "--swap-attention", "--swap-min-bytes", "256")
FORCED = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-router-topk", "2", "--moe-grouped-gemm"),
    *("--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", "alltoall"),
    *("--disable-bias-linear", "--swiglu", "--moe-router-force-load-balancing"),
)
"""Experts whose tokens are drawn anew in each pass."""
NANO, ON_HOST = ("--use-nanopipe",), ("--use-nanopipe", "--use-nanopipe-swap")
NANOPIPE = {
    "operands and state on the host": ((*CHUNKS, *SHARDED), (*ON_HOST, "--swap-optimizer")),
    "norms computed again": ((*CHUNKS, *TP2), (*NANO, "--recompute-norm")),
    "swapped attention": ((*CHUNKS, *LLAMA), (*ON_HOST, *SWAPPED)),
    "experts": ((*CHUNKS, *FORCED), (*NANO, "--moe-alltoall-overlap-comm")),
}
LISTED = {
    "parts computed again": (LLAMA, ("--recompute-norm", "--recompute-activation-function")),
    "swapped attention": (LLAMA, SWAPPED),
    "tensor parallelism, norms computed again": ((*LLAMA, *TP2), ("--recompute-norm",)),
}


def nanopipe(cases):
    return {case: both(*NANOPIPE[case], seed=43) for case in cases}


@pytest.fixture(scope="module")
def trained(asked_for):
    return run_world(nanopipe, 4, [case for case in NANOPIPE if case in asked_for("pair")], timeout=280)


@pytest.mark.thorough
@pytest.mark.parametrize("pair", NANOPIPE)
def test_nanopipe_beside_another_feature_trains_what_the_standalone_host_trains(trained, pair):
    for rank in trained:
        expected, losses, *_ = rank[pair]
        assert losses == expected
        assert len(set(losses)) == len(losses)


@pytest.mark.thorough
def test_operands_go_to_the_host(trained):
    for rank in trained:
        *_, numbers, _ = rank["operands and state on the host"]
        assert all(step["pipeline bytes to the host"] > 0 for step in numbers)


def listed(model, features):
    """The same samples in equal micro-batches, and in micro-batches of a list beside a feature."""
    batch = "8" if TP2[0] in model else "16"
    flags = (
        *(*STAGES, *model, "--micro-batch-size", "2", "--global-batch-size", batch),
        *("--weight-decay", "0"),
    )
    with recorded(*flags) as (memory, run):
        args = run.args
    _, configs = described(*flags)
    line = [*of_the_batches(args), "--optimized-mbs-list", "1,3,3,1", *features]
    with activate(line, platform="cpu", configs=configs) as session:
        own = OwnLoop(session, configs, memory, args)
        batches = memory.batches[0]
        per_step = len(batches) // STEPS
        steps = [[batches[i : i + per_step]] for i in range(0, len(batches), per_step)]
        losses = [own.step(step, args)["lm loss"] for step in steps]
    destroy_megatron_state()
    return memory.losses, losses


def all_listed(cases):
    return {case: listed(*LISTED[case]) for case in cases}


@pytest.fixture(scope="module")
def of_lists(asked_for):
    return run_world(all_listed, 4, [case for case in LISTED if case in asked_for("case")], timeout=280)


@pytest.mark.thorough
@pytest.mark.parametrize("case", LISTED)
def test_micro_batches_of_a_list_beside_another_feature_train_what_equal_ones_do(of_lists, case):
    for rank in of_lists:
        expected, losses = rank[case]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert len(losses) == STEPS
