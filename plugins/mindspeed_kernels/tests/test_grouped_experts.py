"""Grouped experts are the same model on every layout, from the first weights on."""

from contextlib import nullcontext

import pytest
import torch

from mindspeed_kernels.ops.gmm_put_off import PutOffProduct
from mindspeed_testing.training import train_side

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


@pytest.mark.parametrize("put_away", [False, True], ids=["kept", "put away"])
def test_a_gradient_that_comes_later_reaches_the_parameter(put_away):
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.nn.Parameter(torch.randn(2, 4, 3))
    ends, later = torch.tensor([2, 6]), []

    def leave(compute, *operands):
        later.append((compute, operands))

    # Hooks on saved tensors make another tensor of a saved parameter.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with hooks if put_away else nullcontext():
        result = PutOffProduct.apply(rows, weight, weight.shape, ends, leave, False)
    result.backward(gradient := torch.randn(6, 3))
    assert weight.grad is None
    for compute, operands in later:
        compute(*operands)
    wanted = torch.stack([rows[:2].t() @ gradient[:2], rows[2:].t() @ gradient[2:]])
    torch.testing.assert_close(weight.grad, wanted)
