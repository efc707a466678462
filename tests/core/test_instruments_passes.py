"""Forward, backward and recomputed operators are told apart, whatever runs the forward again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mindspeed_megatron.instruments.operations import operations
from mindspeed_megatron.instruments.passes import BACKWARD, FORWARD, RECOMPUTED, current_pass, recomputes
from mindspeed_megatron.instruments.work_counter import WorkCounter

PRODUCT = 2 * 4 * 8 * 8


class Linear(torch.autograd.Function):
    """A product whose forward records nothing, as megatron-core's linear layers."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Own(torch.autograd.Function):
    """A checkpoint of somebody's own."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        with torch.no_grad():
            return two(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        output = again(x, weight)
        torch.autograd.backward(output, gradient)
        return x.grad, weight.grad


@recomputes
def again(x, weight):
    with torch.enable_grad():
        return two(x, weight)


def two(x, weight):
    """Compute one product by a function of one's own and one by torch's, none of which ends the block."""
    return (Linear.apply(x, weight) @ weight).relu()


def counted(function):
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with WorkCounter(current_pass) as counter:
        function(x, weight).sum().backward()
    return {key: operations(work) / PRODUCT for key, work in counter.work.items()}


def test_without_checkpoints_nothing_is_recomputed():
    found = counted(two)
    assert (found[FORWARD], found[BACKWARD], found.get(RECOMPUTED, 0)) == (2, 4, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, weight: checkpoint(two, x, weight, use_reentrant=False),
        lambda x, weight: checkpoint(two, x, weight, use_reentrant=True),
        Own.apply,
    ],
    ids=["non-reentrant", "reentrant", "marked"],
)
def test_every_kind_of_checkpoint_is_told(function):
    found = counted(function)
    assert (found[FORWARD], found[RECOMPUTED], found[BACKWARD]) == (2, 2, 4)


def test_attention_on_cpu_is_counted():
    q, k, v = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3))
    with WorkCounter(current_pass) as counter:
        torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * 2 * 16 * 16 * 8
    found = {key: operations(work) for key, work in counter.work.items()}
    assert found[FORWARD] == 2 * product
    assert found[BACKWARD] == 5 * product
