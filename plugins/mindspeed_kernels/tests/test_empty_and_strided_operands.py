"""Operands without rows, of other strides and of float64, by the paths of CPUs."""

import pytest
import torch

from mindspeed_kernels.ops import (
    npu_fusion_attention,
    npu_fusion_attention_grad,
    npu_gmm,
    npu_moe_token_unpermute,
    npu_ring_attention_update,
    npu_weight_quant_gmm,
    triangle_attention,
)
from mindspeed_kernels.ops.availability import kernel_of


def strided(tensor):
    """The same numbers, with columns behind one another."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_attention_reads_rows_that_are_not_contiguous(which, layout):
    torch.manual_seed(0)
    shape = (1, 2, 3, 4) if layout == "BNSD" else (3, 2, 4)
    ends = {} if layout == "BNSD" else {"actual_seq_qlen": [3], "actual_seq_kvlen": [3]}
    plain = [torch.randn(shape) for _ in range(3)]
    other = [strided(tensor) if place == which else tensor for place, tensor in enumerate(plain)]
    results = []
    for tensors in (plain, other):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        context = npu_fusion_attention(*leaves, 2, layout, **ends)[0]
        context.square().sum().backward()
        results.append([context.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def test_attention_of_no_sample_is_empty_and_has_gradients():
    leaves = [torch.zeros(0, 2, 3, 4, requires_grad=True) for _ in range(3)]
    context, maximum, total, *_ = npu_fusion_attention(
        *leaves, 2, "BNSD", atten_mask=torch.zeros(3, 3, dtype=torch.bool)
    )
    context.sum().backward()
    assert [leaf.grad.shape for leaf in leaves] == [leaf.shape for leaf in leaves]
    facts = {"softmax_max": maximum, "softmax_sum": total, "attention_in": context.detach()}
    plain = [leaf.detach() for leaf in leaves]
    found = npu_fusion_attention_grad(*plain, context.detach(), 2, "BNSD", sparse_mode=2, **facts)
    assert found[0].shape == (0, 2, 3, 4)


def test_no_tokens_come_back_as_none():
    rows = torch.zeros(0, 3, requires_grad=True)
    probs = torch.zeros(0, 2, requires_grad=True)
    result = npu_moe_token_unpermute(rows, torch.zeros(0, dtype=torch.int32), probs)
    result.sum().backward()
    assert result.shape == rows.grad.shape == (0, 3)
    assert probs.grad.shape == (0, 2)


def test_probabilities_of_other_strides_come_back_with_gradients():
    torch.manual_seed(0)
    rows, probs = torch.randn(4, 3), torch.rand(2, 2)
    where = torch.tensor([1, 3, 0, 2], dtype=torch.int32)
    results = []
    for weights in (probs, strided(probs)):
        leaves = [tensor.detach().requires_grad_() for tensor in (rows, weights)]
        result = npu_moe_token_unpermute(leaves[0], where, leaves[1])
        result.square().sum().backward()
        results.append([result.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def test_blocks_of_no_query_are_joined():
    output, rows = torch.zeros(0, 1, 8), torch.zeros(1, 1, 0, 8)
    joined = npu_ring_attention_update(output, rows, rows, output, rows, rows)
    assert [tuple(part.shape) for part in joined] == [(0, 1, 8), (1, 1, 0, 8), (1, 1, 0, 8)]


def test_triangle_attention_of_no_query_is_followed_by_autograd():
    leaves = [torch.zeros(0, 1, 2, 4, requires_grad=True) for _ in range(3)]
    triangle_attention(*leaves).sum().backward()
    assert all(leaf.grad is not None for leaf in leaves)


def test_groups_of_the_summed_dimension_are_multiplied_in_float64():
    torch.manual_seed(0)
    x, dy = torch.randn(2, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    found = npu_gmm(x, dy, group_list=[1, 4], group_type=2)
    torch.testing.assert_close(found, torch.stack((x[:, :1] @ dy[:1], x[:, 1:] @ dy[1:])))


def test_widened_weights_of_float64_rows_are_not_rounded_to_float32():
    torch.manual_seed(0)
    x, scale = torch.randn(2, 3, dtype=torch.float64), torch.rand(1, 2, dtype=torch.float64)
    weight = torch.randint(-128, 128, (1, 3, 2), dtype=torch.int8)
    found = npu_weight_quant_gmm(
        x, weight, scale, antiquant_offset=torch.zeros_like(scale), group_list=[2], act_type=0
    )
    torch.testing.assert_close(found, x @ (weight[0] * scale[0]), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("generation", "reason"), [("910B", ""), ("", ""), ("310P", "no such kernel")])
def test_a_kernel_that_a_generation_lacks_is_not_available(generation, reason, monkeypatch):
    monkeypatch.setattr("mindspeed_kernels.ops.availability.torch_npu_missing", lambda: "")
    monkeypatch.setattr("mindspeed_kernels.ops.availability.ascend_generation", lambda: generation)
    found = kernel_of("910B", "910_93")()
    assert reason in found
    assert bool(found) == bool(reason)
