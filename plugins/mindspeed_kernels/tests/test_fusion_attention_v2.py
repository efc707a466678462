"""Upstream's names and keywords of fused attention: scripts move over by changing the import."""

import math

import pytest
import torch
from attention_kernels import attention_kernels

from mindspeed_kernels.op_builder import FusionAttentionV2OpBuilder
from mindspeed_kernels.ops import ContractError
from mindspeed_kernels.ops.fusion_attention_v2 import npu_fusion_attention, npu_fusion_attention_grad


def tensors(n=2, s=6, d=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, n, s, d, generator=generator) for _ in range(4)]


def by_autograd(q, k, v, outer, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    npu_fusion_attention(*leaves, 2, "BNSD", **options)[0].backward(outer)
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("statistics", [True, False])
def test_gradients_take_upstream_s_keywords(statistics):
    q, k, v, outer = tensors()
    options = {"scale": 0.3, "sparse_mode": 2}
    expected = by_autograd(q, k, v, outer, **options)
    facts = {}
    if statistics:
        context, highest, total, *_ = npu_fusion_attention(q, k, v, 2, "BNSD", **options)
        facts = {"softmax_max": highest, "softmax_sum": total, "attention_in": context}
    found = npu_fusion_attention_grad(q, k, v, outer, 2, "BNSD", **facts, **options)
    assert found[3] is None
    torch.testing.assert_close(list(found[:3]), expected)
    with attention_kernels() as calls:
        found = npu_fusion_attention_grad(q, k, v, outer, 2, "BNSD", **facts, **options)
    assert calls["npu_fusion_attention_grad"] == 1
    torch.testing.assert_close(list(found[:3]), expected, rtol=1e-4, atol=1e-5)


def test_dropped_weights_need_the_statistics():
    q, k, v, outer = tensors()
    with pytest.raises(ContractError, match="must be given with keep_prob below 1"):
        npu_fusion_attention_grad(q, k, v, outer, 2, "BNSD", keep_prob=0.5)


def test_a_causal_mask_with_limits_runs_as_upstream_s_example_calls_it():
    batch, heads, size, width = 1, 2, 64, 16
    generator = torch.Generator().manual_seed(0)
    shape = size, batch, heads * width
    q, k, v = ((torch.rand(shape, generator=generator) - 0.5) * 5 for _ in range(3))
    mask = torch.ones(size, size, dtype=torch.bool).triu(1)
    options = {
        "atten_mask": mask,
        "scale": 1.0 / math.sqrt(width),
        "keep_prob": 1.0,
        "pre_tokens": 65536,
        "next_tokens": 0,
        "pse_type": 1,
    }
    expected = npu_fusion_attention(q, k, v, heads, "SBH", scale=options["scale"], sparse_mode=2)[0]
    torch.testing.assert_close(npu_fusion_attention(q, k, v, heads, "SBH", **options)[0], expected)
    with attention_kernels():
        torch.testing.assert_close(
            npu_fusion_attention(q, k, v, heads, "SBH", **options)[0], expected, rtol=1e-4, atol=1e-5
        )


def test_the_loader_brings_both_functions_with_arguments_by_position():
    q, k, v, outer = tensors()
    loaded = FusionAttentionV2OpBuilder().load()
    result = loaded.npu_fusion_attention_v2(q, k, v, 2, "BNSD", None, None, None, 0.3, 1.0)
    torch.testing.assert_close(result[0], npu_fusion_attention(q, k, v, 2, "BNSD", scale=0.3)[0])
    statistics = result[1], result[2], None, result[0]
    found = loaded.npu_fusion_attention_grad_v2(
        *(q, k, v, outer, 2, "BNSD", None, None, None, *statistics, 0.3, 1.0)
    )
    torch.testing.assert_close(list(found[:3]), by_autograd(q, k, v, outer, scale=0.3))
