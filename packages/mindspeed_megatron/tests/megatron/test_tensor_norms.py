"""The norm of gradients waits once, and is megatron-core's to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import utils as megatron_utils
from megatron.core.optimizer import clip_grads

from mindspeed_core.activation import activate
from mindspeed_megatron.tensor_norms import l2_norm, with_one_wait
from mindspeed_testing.model_flags import training_flags


def as_megatron_core(tensors):
    """``local_multi_tensor_l2_norm`` without its copy to the device."""
    return torch.tensor([float(torch.norm(torch.tensor([[torch.norm(tensor) for tensor in tensors]])))])


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    seed=st.integers(0, 2**31),
    halves=st.booleans(),
)
def test_it_is_equal_to_megatron_cores_bit_for_bit(sizes, seed, halves):
    numbers = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(size, generator=numbers) * 10.0 ** float(torch.randn((), generator=numbers))
        for size in sizes
    ]
    if halves:
        tensors[::2] = [tensor.bfloat16() for tensor in tensors[::2]]
    found, nothing = l2_norm(65536, None, [tensors], False)
    assert nothing is None
    assert torch.equal(found, as_megatron_core(tensors))


def test_what_transformer_engine_brings_stays():
    def other():
        """Stands for its norm."""

    assert with_one_wait(other) is other
    assert with_one_wait(megatron_utils.local_multi_tensor_l2_norm) is l2_norm


def test_every_session_takes_the_norm_so_and_puts_the_former_one_back():
    before = clip_grads.l2_norm_impl
    with activate(training_flags((), 1), platform="cpu", host="standalone"):
        assert clip_grads.l2_norm_impl is l2_norm
    assert clip_grads.l2_norm_impl is before


def test_no_gradient_is_read_on_the_way():
    tensors = [torch.ones(3), torch.ones(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda self: pytest.fail("waits for the device"))
        patch.setattr(torch.Tensor, "__float__", lambda self: pytest.fail("waits for the device"))
        assert l2_norm(0, None, [tensors], False)[0].shape == (1,)
