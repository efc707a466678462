"""Calls at the edge of what kernels take: some are theirs, for the others they are not asked."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ops import (
    npu_groupmatmul_add_fp32,
    npu_matmul_add_fp32,
    npu_moe_token_permute,
    npu_moe_token_permute_with_routing_map,
    npu_moe_token_unpermute_with_routing_map,
)
from mindspeed_kernels.ops.ffn import npu_ffn, npu_ffn_reference
from mindspeed_kernels.ops.routing_maps import sample_map
from mindspeed_testing.npu import value_device


def numbers(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("inner", "columns"), [(8, 0), (0, 16)])
def test_a_gradient_without_numbers_gets_nothing_added(inner, columns):
    with value_device() as device:
        grad = torch.zeros(columns, inner, device="npu")
        npu_matmul_add_fp32(numbers(6, inner).to("npu"), numbers(6, columns).to("npu"), grad)
        assert device.count("_npu_matmul_add_fp32") == 0


@pytest.mark.parametrize(("rows", "ends", "kernels"), [(4, [4], 0), (0, [0, 0], 0), (4, [1, 4], 1)])
def test_one_group_and_no_rows_are_not_for_the_kernel_of_groups(rows, ends, kernels):
    x, dy = numbers(rows, 8), numbers(rows, 16)
    with value_device() as device:
        grad = torch.zeros(len(ends), 8, 16, device="npu")
        npu_groupmatmul_add_fp32(x.to("npu"), dy.to("npu"), ends, grad)
        assert device.count("npu_grouped_matmul_add_") == kernels
        starts = [0, *ends[:-1]]
        expected = [x[start:end].float().t() @ dy[start:end].float() for start, end in zip(starts, ends)]
        torch.testing.assert_close(grad.cpu(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_tokens_that_go_nowhere_are_not_permuted_by_the_kernel():
    with value_device() as device:
        indices = torch.zeros(4, 0, dtype=torch.int64, device="npu")
        rows, where = npu_moe_token_permute(numbers(4, 6).to("npu"), indices)
        assert (rows.shape, where.numel()) == ((0, 6), 0)
        assert device.count("npu_moe_token_permute") == 0


def test_a_gated_activation_is_computed_in_the_fast_precision_that_is_asked_for():
    tensors = [numbers(*shape, dtype=torch.float16) for shape in ((6, 8), (8, 16), (8, 8))]
    with value_device() as device:
        found = npu_ffn(*(one.to("npu") for one in tensors), "swiglu", inner_precise=1)
        assert device.count("npu_ffn") == 1
        expected = npu_ffn_reference(*tensors, "swiglu", inner_precise=1)
        torch.testing.assert_close(found.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_bfloat16_is_computed_in_the_precision_that_its_kernel_has():
    tensors = [numbers(*shape) for shape in ((6, 8), (8, 16), (16, 8))]
    with value_device() as device:
        found = npu_ffn(*(one.to("npu") for one in tensors), "silu", inner_precise=1)
        assert device.count("npu_ffn") == 1
        expected = npu_ffn_reference(*tensors, "silu", inner_precise=1)
        torch.testing.assert_close(found.cpu(), expected, rtol=3e-2, atol=3e-2)


def test_integers_of_experts_without_an_offset_are_quantized_around_zero():
    x, first, second = (
        (numbers(*shape, dtype=torch.float32) * 4).to(torch.int8) for shape in ((6, 8), (2, 8, 4), (2, 4, 8))
    )
    scales = {"scale": torch.rand(2) + 0.5, "deq_scale1": torch.rand(2, 4), "deq_scale2": torch.rand(2, 8)}
    with value_device() as device:
        moved = {name: value.to("npu") for name, value in scales.items()}
        found = npu_ffn(*(one.to("npu") for one in (x, first, second)), "relu", expert_tokens=[2, 4], **moved)
        assert device.count("npu_ffn") == 1
        expected = npu_ffn_reference(x, first, second, "relu", expert_tokens=[2, 4], **scales)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-2)


def test_probabilities_of_padded_rows_need_no_map():
    tokens, probs = numbers(4, 6, dtype=torch.float32), numbers(4, 5, dtype=torch.float32)
    options = {"num_out_tokens": 10, "drop_and_pad": True}
    rows, _, where = npu_moe_token_permute_with_routing_map(tokens, sample_map(tokens.device), **options)
    unpermute = npu_moe_token_unpermute_with_routing_map
    expected = unpermute(rows, where, (4, 6), probs=probs, drop_and_pad=True)
    with value_device() as device:
        moved = (rows.to("npu"), where.to("npu"), (4, 6))
        found = unpermute(*moved, probs=probs.to("npu"), drop_and_pad=True)
        assert device.count("_npu_moe_token_unpermute_with_routing_map") == 1
        torch.testing.assert_close(found.cpu(), expected)


def test_a_negative_number_of_rows_leaves_out_the_last_copies():
    tokens, indices = numbers(4, 6), torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])
    expected = npu_moe_token_permute(tokens, indices, -3)[0]
    with value_device() as device:
        rows, _ = npu_moe_token_permute(tokens.to("npu"), indices.to("npu"), -3)
        assert device.count("npu_moe_token_permute") == 1
        torch.testing.assert_close(rows.cpu(), expected)
