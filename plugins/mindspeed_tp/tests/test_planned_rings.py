"""The launch whose ring of two waited for ever on devices: its dry run refuses it without the cure."""

import os
from unittest import mock

import pytest

from mindspeed_megatron.instruments.call_order import disagreements, waiting_for_ever
from mindspeed_testing import run_world
from mindspeed_testing.dry_run import MeasureRequest, measure_rank
from mindspeed_testing.lagging.planting import PlantedFault, planted
from mindspeed_testing.model_flags import training_flags
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import MODEL

LAUNCH = (
    *(*MODEL, *grid(2, 2), "--enable-overlap-ag-with-matmul", "--num-layers", "1"),
    *("--global-batch-size", "1"),
)
UNBATCHED = PlantedFault(
    "mindspeed_tp.products",
    "dist.batch_isend_irecv(",
    "(lambda messages: [one.op(one.tensor, one.peer, one.group) for one in messages])(",
)


def planned():
    """Return the calls of all ranks of the launch, one planned after the other."""
    calls = {}
    for rank in range(4):
        with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE="4", LOCAL_RANK="0"):
            calls[rank] = measure_rank(MeasureRequest(training_flags(LAUNCH, 3), "fake")).calls
    return calls


def before_and_after():
    """Return what each plan says of its order of calls."""
    with planted(UNBATCHED):
        before = planned()
    after = planned()
    return [(disagreements(list(calls.values())), waiting_for_ever(calls)) for calls in (before, after)]


@pytest.fixture(scope="module")
def plans():
    return run_world(before_and_after, 1)[0]


def test_a_ring_that_sends_before_it_receives_is_refused(plans):
    (agree, waiting), _ = plans
    # Each direction alone is in order, which is why gloo and a comparison of calls let it pass.
    assert agree == []
    assert len(waiting) == 4
    assert "isend" in waiting[0]
    assert "a send when its receive is reached" in waiting[0]


def test_the_same_ring_in_batches_is_accepted(plans):
    assert plans[1] == ([], [])
