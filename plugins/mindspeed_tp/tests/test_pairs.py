"""Policies of planned linears combine: executor, layout, recomputation, time of weight gradients."""

from itertools import product

import pytest

from mindspeed_testing.compare import compare_tensors
from mindspeed_testing.compare_sides import compare_sides
from mindspeed_testing.training import train_side
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import BOTH_OVERLAPS, COC, FULL, MODEL, PP2, REWRITTEN, SP, TP2

EXECUTORS = {"coc": (*COC, "2"), "mc2": ("--use-ascend-mc2",)}
LAYOUTS = {"1d": (*TP2, *SP), "2d": grid(1, 2)}
RECOMPUTED = {"kept": (), "level2": (*FULL, "--optimize-recomp-communication-level", "2")}
GRADIENTS = {"now": (), "delayed": (*PP2, "--pipeline-schedule", "zb-h1")}
"""A schedule computes gradients of weights apart: after those of inputs, and of two stages."""
PAIRS = [
    pytest.param(*names, id="-".join(names), marks=() if not number else pytest.mark.thorough)
    for number, names in enumerate(product(EXECUTORS, LAYOUTS, RECOMPUTED, reversed(GRADIENTS)))
]
BATCH = ("--micro-batch-size", "1", "--global-batch-size", "4")
STEPS, TOLERANCE = 3, 1e-5


@pytest.fixture(scope="module")
def alone():
    """The training of one process, which all pairs begin with the weights of."""
    return train_side((*MODEL, *BATCH), 1, STEPS, platform="cpu")


@pytest.mark.parametrize(("executor", "layout", "recomputed", "gradients"), PAIRS)
def test_policies_combine(alone, executor, layout, recomputed, gradients):
    flags = (*EXECUTORS[executor], *LAYOUTS[layout], *RECOMPUTED[recomputed], *GRADIENTS[gradients])
    ranks = 4 if GRADIENTS[gradients] else 2
    side = train_side((*MODEL, *BATCH, *flags), ranks, STEPS, initial=alone.initial, platform="cpu")
    assert {executor, "tp-linear"} <= set(side.features)
    assert (gradients == "delayed") == ("pp-weight-gradients" in side.features)
    for found, wanted in (
        (side.parameters, alone.parameters),
        *zip(side.gradients, alone.gradients, strict=True),
    ):
        compared = compare_tensors(found.tensors, wanted.tensors, tolerance=TOLERANCE)
        assert compared.equal, str(compared)
    for name, losses in alone.losses.items():
        assert side.losses[name] == pytest.approx(losses, rel=TOLERANCE)


INTERLEAVED = (*PP2, "--num-layers-per-virtual-pipeline-stage", "1", "--pipeline-schedule", "interleaved")
SHAPES = {
    "grid": ((), grid(1, 2)),
    "uneven": (("--seq-length", "33", "--max-position-embeddings", "33"), (*TP2, *SP, "--unaligned-linear")),
}


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES)
def test_an_interleaved_schedule_of_ones_own_hands_on_tensors_of_another_shape(shape):
    both, layout = SHAPES[shape]
    model = (*MODEL, *BATCH, *both, "--num-layers", "4")
    theirs = train_side(model, 1, STEPS, platform="cpu")
    ours = train_side((*model, *layout, *INTERLEAVED), 4, STEPS, initial=theirs.initial, platform="cpu")
    assert "pp-engine" in ours.features
    compared, _ = compare_sides(ours, theirs, tolerance=TOLERANCE)
    assert compared.equal, str(compared)


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [(), ("--use-gradient-accumulation-fusion",)], ids=["added", "in-place"])
def test_delayed_gradients_reach_overlapped_data_parallelism_to_the_bit(flags):
    layout = (*MODEL, *BATCH, *GRADIENTS["delayed"], *BOTH_OVERLAPS, *flags)
    theirs = train_side(layout, 4, STEPS, platform="cpu")
    ours = train_side((*layout, *REWRITTEN), 4, STEPS, initial=theirs.initial, platform="cpu")
    assert {"tp-linear", "pp-weight-gradients"} <= set(ours.features)
    compared, _ = compare_sides(ours, theirs, tolerance=0.0)
    assert compared.equal, str(compared)
