"""Adapters and the ends of models in a loop of one's own: it trains what the standalone host trains."""

import pytest
from own_loop import both

from mindspeed_testing import run_world

MODEL = (
    *("--disable-bias-linear", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--swiglu"),
    "--untie-embeddings-and-output-weights",
)
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
LORA = ("--lora-target-modules", "linear_qkv", "linear_fc1", "--lora-r", "4")
CASES = {
    "lora": (("--use-distributed-optimizer",), LORA),
    "lora, tp2": (TP2, LORA),
    "normalized head": (TP2, ("--lm-norm-weight",)),
    "norm of the embedding": (TP2, ("--embed-layernorm",)),
    "z-loss": (TP2, ("--z-loss-weight", "0.5")),
    "biases of attention": (TP2, ("--row-col-parallel-linear-bias", "--disable-bias-linear")),
}


NAMES = [
    name if name in ("lora, tp2", "z-loss") else pytest.param(name, marks=pytest.mark.thorough)
    for name in CASES
]


def train_all(names):
    return {name: both((*MODEL, *CASES[name][0]), CASES[name][1]) for name in names}


@pytest.fixture(scope="module")
def trained(asked_for):
    return run_world(train_all, 2, [name for name in CASES if name in asked_for("name")], timeout=280)


@pytest.mark.parametrize("name", NAMES)
def test_the_losses_are_those_of_the_standalone_host(trained, name):
    for rank in trained:
        expected, losses, *_ = rank[name]
        assert losses == pytest.approx(expected, rel=1e-6)
        assert len(set(losses)) == len(losses)
