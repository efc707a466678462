"""Grouped experts are the same model on every layout, from the first weights on."""

import pytest
import torch

from mindspeed_core.testing.training import train_side

MODEL = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--num-layers", "2"),
    *("--swiglu", "--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall"),
)
GROUPED = (*MODEL, "--moe-grouped-gemm")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
WHOLE = (*TP2, "--expert-tensor-parallel-size", "1")
EP2 = ("--expert-model-parallel-size", "2")


@pytest.fixture(scope="module")
def one():
    return train_side(GROUPED, 1, 1)


def differing(side, other):
    """The keys of tensors that differ in a bit."""
    theirs = other.tensors
    return [key for key, tensor in side.tensors.items() if not torch.equal(tensor, theirs[key])]


def test_they_begin_as_sequential_experts_do(one):
    assert differing(train_side(MODEL, 1, 1).initial, one.initial) == []


@pytest.mark.parametrize("layout", [WHOLE, EP2, TP2], ids=["whole", "ep2", "cut"])
def test_a_layout_begins_and_learns_as_one_process_does(one, layout):
    two = train_side((*GROUPED, *layout), 2, 1)
    assert differing(two.initial, one.initial) == []
    for key, gradient in one.gradients[0].tensors.items():
        torch.testing.assert_close(two.gradients[0].tensors[key], gradient, rtol=1e-4, atol=1e-6, msg=key)
    assert two.parameters.drifted() == {}
    assert two.grad_norms[0] == pytest.approx(one.grad_norms[0], rel=1e-5)
