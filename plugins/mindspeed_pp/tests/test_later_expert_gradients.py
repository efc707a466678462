"""Grouped experts whose weight gradients come when the schedule says so."""

import pytest
from trained import distance, initial_state, set_up, trained

from mindspeed_pp.weight_gradients import WeightGradients
from mindspeed_testing import run_world

MODEL = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--swiglu"),
    *("--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
    *("--untie-embeddings-and-output-weights", "--moe-grouped-gemm"),
)
PP2 = (*MODEL, "--pipeline-model-parallel-size", "2")
ADDED = ("--gemm-gradient-accumulation-fusion",)
OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
EP2 = ("--expert-model-parallel-size", "2")
OVERLAPPED = (*EP2, "--moe-alltoall-overlap-comm")
TWO_RANKS = {"experts": (), "experts, added in place": ADDED}
FOUR_RANKS = {
    "data parallel": OVERLAPS,
    "expert parallel": (*OVERLAPS, *ADDED, *EP2),
    "overlapped": OVERLAPPED,
    "overlapped, added in place": (*OVERLAPPED, *ADDED),
    "overlapped, data parallel": (*OVERLAPPED, *OVERLAPS),
    "level 0": (*OVERLAPPED, "--moe-zero-memory", "level0"),
    "level 1": (*OVERLAPPED, "--moe-zero-memory", "level1"),
    "some layers": (*OVERLAPPED, "--moe-zero-memory", "level1", "--moe-zero-memory-num-layers", "1"),
    "crowded": (*EP2, "--moe-adaptive-recompute-activation"),
}


def both(cases, initial):
    """Train 1F1B and zero-bubble; the second one's put-off gradients are counted."""
    found = {}
    for name, flags in cases.items():
        sides = []
        for schedule in ("1f1b", "zb-h1"):
            with set_up(*PP2, *flags, "--pipeline-schedule", schedule, initial=initial) as run:
                sides.append(trained(run))
                seen = run.session.state(WeightGradients).seen
        found[name] = *sides, seen
    return found


def compared(cases, ranks):
    ((initial, _),) = run_world(initial_state, 1, MODEL)
    for name, (plain, split, seen) in run_world(both, ranks, cases, initial, timeout=400)[0].items():
        assert split.losses == plain.losses, name
        assert distance(split.gradients, plain.gradients) == 0, name
        assert distance(split.parameters, plain.parameters) == 0, name
        # In each of two steps, two linears of attention and two weights of experts of two layers.
        assert seen == 2 * (16 // ranks) * 2 * 4, name


def test_gradients_of_experts_come_later_to_the_bit():
    compared(TWO_RANKS, 2)


@pytest.mark.thorough
def test_gradients_of_experts_come_later_beside_other_parallelism():
    compared(FOUR_RANKS, 4)
