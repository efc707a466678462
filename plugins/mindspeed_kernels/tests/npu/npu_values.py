"""Every operator's NPU backends with numbers: results, changed arguments and gradients of the reference."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from mindspeed_kernels import ops
from mindspeed_kernels.conformance import check_backend
from mindspeed_kernels.ops import OPERATORS
from mindspeed_testing.npu import value_device

for found in iter_modules(ops.__path__):
    import_module(f"{ops.__name__}.{found.name}")

BACKENDS = [
    (name, backend.name)
    for name, operator in sorted(OPERATORS.items())
    for backend in operator.backends.values()
    if operator.samples is not None and "npu" in backend.devices and "cpu" not in backend.devices
]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_a_backend_of_the_device_computes_the_reference_and_every_gradient(name, backend):
    with value_device():
        dtypes = (torch.bfloat16, torch.float32)
        assert sum(check_backend(name, backend, device="npu", dtype=dtype) for dtype in dtypes)


def test_the_norm_s_epsilon_reaches_the_kernel():
    from mindspeed_kernels.ops import rms_norm

    with value_device():
        x, gamma = torch.ones(2, 16, device="npu"), torch.ones(16, device="npu")
        torch.testing.assert_close(rms_norm(x, gamma, 1.0), x / 2**0.5)


def test_a_call_without_rows_does_not_decide_for_the_next_one():
    from mindspeed_kernels.ops import rms_norm, swiglu

    with value_device() as device:
        gamma = torch.ones(16, device="npu")
        for rows in (0, 2, 0, 2):
            x = torch.ones(rows, 16, device="npu")
            assert rms_norm(x, gamma).shape == x.shape
            assert swiglu(x).shape == (rows, 8)
        assert (device.count("npu_rms_norm"), device.count("npu_swiglu")) == (2, 2)


def test_scores_of_another_size_do_not_decide_for_the_next_ones():
    from mindspeed_kernels.ops import scaled_masked_softmax

    with value_device() as device:
        for size in (5, 32, 5, 32):
            x = torch.ones(1, 1, size, size, device="npu")
            assert scaled_masked_softmax(x).sum().item() == pytest.approx(size)
        assert device.count("npu_scaled_masked_softmax") == 2


def test_a_width_that_the_rotary_kernel_lacks_does_not_decide_for_the_next_ones():
    from mindspeed_kernels.ops.npu_rotary_position_embedding import npu_rotary_position_embedding

    with value_device() as device:
        for width in (896, 8, 896, 8):
            x, cos, sin = (torch.full((2, 1, 1, width), value, device="npu") for value in (1.0, 3.0, 2.0))
            first, second = npu_rotary_position_embedding(x, cos, sin).chunk(2, -1)
            assert (first.unique().tolist(), second.unique().tolist()) == ([1.0], [5.0])
        assert device.count("npu_rotary_mul") == 2


def test_heads_wider_than_the_attention_kernel_knows_are_attended_without_it_in_both_directions():
    from mindspeed_kernels.ops import fusion_attention

    with value_device() as device:
        for width in (16, 784, 16, 784):
            query = torch.ones(1, 1, 4, width, device="npu", requires_grad=True)
            context = fusion_attention.npu_fusion_attention(query, query, query, 1, "BNSD")[0]
            context.sum().backward()
            torch.testing.assert_close(context.detach(), query.detach())
            assert query.grad.isfinite().all()
        kernels = ("npu_fusion_attention", "npu_fusion_attention_grad")
        assert [device.count(kernel) for kernel in kernels] == [2, 2]


def test_a_single_group_of_8_bit_rows_is_multiplied_by_the_kernel():
    from mindspeed_kernels.ops import npu_quant_gmm

    with value_device() as device:
        x = torch.full((2, 16), 3, dtype=torch.int8, device="npu")
        weight = torch.full((1, 16, 8), 2, dtype=torch.int8, device="npu")
        scale = torch.ones(1, 8, device="npu")
        assert npu_quant_gmm(x, weight, scale, group_list=[2]).cpu().eq(96).all()
        assert device.count("npu_grouped_matmul") == 1


@pytest.mark.parametrize("given", ["expert_tokens", "expert_tokens_index"])
def test_tokens_of_experts_are_counted_or_end_somewhere(given):
    from mindspeed_kernels.ops.ffn import npu_ffn, npu_ffn_reference

    made = torch.Generator().manual_seed(1)
    shapes = (6, 8), (2, 8, 16), (2, 16, 8)
    tensors = [torch.randn(*shape, generator=made).bfloat16() for shape in shapes]
    tokens = {given: [2, 4] if given == "expert_tokens" else [2, 6]}
    with value_device() as device:
        found = npu_ffn(*(tensor.to("npu") for tensor in tensors), "silu", **tokens)
        assert device.count("npu_ffn") == 1
        expected = npu_ffn_reference(*tensors, "silu", **tokens)
        torch.testing.assert_close(found.cpu(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("ends", [None, [0, 3, 7]])
def test_packed_outputs_are_joined_by_the_kernel(ends):
    from mindspeed_kernels.ops import npu_ring_attention_update
    from mindspeed_kernels.ops.npu_ring_attention_update import npu_ring_attention_update_reference

    made = torch.Generator().manual_seed(1)
    blocks = []
    for _ in range(2):
        highest, total = (torch.randn(7, 2, 1, generator=made).repeat(1, 1, 8) for _ in range(2))
        blocks += [torch.randn(7, 2, 64, generator=made), highest, total.exp()]
    places = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    with value_device() as device:
        moved = None if places is None else places.to("npu")
        found = npu_ring_attention_update(*(tensor.to("npu") for tensor in blocks), moved, "TND")
        assert device.count("npu_ring_attention_update") == 1
        expected = npu_ring_attention_update_reference(*blocks, places, "TND")
        for one, other in zip(found, expected):
            torch.testing.assert_close(one.cpu(), other)
