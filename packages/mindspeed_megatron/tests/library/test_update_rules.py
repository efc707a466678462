"""Update rules in a loop of one's own: it trains, to the bit, what the standalone host trains."""

import pytest
from own_loop import both

from mindspeed_testing import run_world

TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
SHARDED = ("--use-distributed-optimizer",)
# The loop reduces gradients in the type of the model.
HALF = (*SHARDED, "--bf16", "--grad-reduce-in-bf16")
CASES = {
    "fused": (SHARDED, ("--optimizer", "fused_adam")),
    "muon": (SHARDED, ("--optimizer", "muon", "--muon-nesterov", "--muon-momentum", "0.9")),
    "cadam": (HALF, ("--optimizer", "cadam")),
    "averaged weights": (HALF, ("--optimizer-selection", "fused_ema_adamw", "--ema-decay", "0.5")),
    "moments of 8 bits": (HALF, ("--quant-states", "fp8")),
    "muon, shared by tensor-parallel ranks": (TP2, ("--optimizer", "muon", "--muon-tp-mode", "distributed")),
}


def train_all():
    # The configurations, which are made from the first flags, name the optimizer too.
    return {name: both((*model, *features), features) for name, (model, features) in CASES.items()}


@pytest.fixture(scope="module")
def trained():
    return run_world(train_all, 2, timeout=280)


@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    for rank in trained:
        expected, losses, *_ = rank[name]
        assert losses == expected
        assert len(set(losses)) == len(losses)
