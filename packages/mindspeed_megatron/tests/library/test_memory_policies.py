"""Measured policies of memory in a loop of one's own: trained, to the bit, as by the standalone host."""

import own_loop
import pytest

from mindspeed_testing import run_world

STEPS = 7
CASES = {
    "a measured plan": (
        *("--adaptive-recompute-device-size", "100", "--adaptive-recompute-profiling-step", "5"),
    ),
    "a measured plan with swaps": (
        *("--adaptive-memory-optimization", "--adaptive-recompute-profiling-step", "5"),
        *("--swap-min-bytes", "256"),
    ),
    "a traced step": ("--smart-swap", "--swap-min-bytes", "256"),
}


def train_all():
    own_loop.STEPS = STEPS
    return {name: own_loop.both((), flags) for name, flags in CASES.items()}


@pytest.fixture(scope="module")
def trained():
    return run_world(train_all, 1)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    expected, losses, _, numbers, _ = trained[name]
    assert len(losses) == STEPS
    assert losses == expected
    followed = "swapped bytes" if name == "a traced step" else "planned bytes"
    assert numbers[-1][followed] > 0
