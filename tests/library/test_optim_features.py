"""Rules of mindspeed-optim in a loop of one's own: it trains, to the bit, what the standalone host trains."""

import pytest
from own_loop import both

from mindspeed_core.testing import run_world

# The loop reduces gradients in the type of the model.
HALF = ("--bf16", "--grad-reduce-in-bf16")
SHARDED = ("--use-distributed-optimizer",)
# A configuration names the optimizer too.
CADAM = ("--optimizer", "cadam")
EMA = ("--optimizer-selection", "fused_ema_adamw", "--ema-decay", "0.5")
CASES = {
    "cadam": ((*HALF, *CADAM), CADAM),
    "ema": (HALF, EMA),
    "fp8": (HALF, ("--quant-states", "fp8")),
    "cadam, sharded": ((*HALF, *SHARDED, *CADAM), CADAM),
    "ema, sharded": ((*HALF, *SHARDED), EMA),
    "bf16, sharded": ((*HALF, *SHARDED), ("--quant-states", "bf16")),
}
SHARDED_CASES = ("cadam, sharded", "ema, sharded", "bf16, sharded")


def train_all(names):
    return {name: both(*CASES[name]) for name in names}


@pytest.fixture(scope="module")
def trained(asked_for):
    asked = [name for name in CASES if name in asked_for("case")]
    found = {}
    for ranks in (1, 2):
        names = [name for name in asked if (name in SHARDED_CASES) == (ranks == 2)]
        if names:
            for rank in run_world(train_all, ranks, names, timeout=300):
                for name, result in rank.items():
                    found.setdefault(name, []).append(result)
    return found


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SHARDED_CASES)) for name in CASES]
)
def test_the_losses_are_those_of_the_standalone_host(trained, case):
    for expected, losses, *_ in trained[case]:
        assert losses == expected
        assert len(set(losses)) == len(losses)
