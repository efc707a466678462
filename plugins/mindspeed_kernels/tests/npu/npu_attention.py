"""Fused attention on the device: every mode and layout, both versions of its kernel, and its backward."""

from __future__ import annotations

import pytest
import torch

from mindspeed_kernels.ops.availability import device_missing
from mindspeed_kernels.ops.fusion_attention import npu_fusion_attention
from mindspeed_kernels.ops.fusion_attention_grad import npu_fusion_attention_grad
from mindspeed_testing.npu import Call, fake_npu, run_call, value_device

BATCH, HEADS, GROUPS, LENGTH, WIDTH = 2, 8, 2, 64, 32
ENDS = [16, 48, 128]
TOKENS = ENDS[-1]


def shape(layout, heads):
    return {
        "BSH": (BATCH, LENGTH, heads * WIDTH),
        "SBH": (LENGTH, BATCH, heads * WIDTH),
        "BNSD": (BATCH, heads, LENGTH, WIDTH),
        "BSND": (BATCH, LENGTH, heads, WIDTH),
        "TND": (TOKENS, heads, WIDTH),
    }[layout]


def inputs(npu, layout):
    return [npu.tensor(*shape(layout, heads), requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]


def attend(layout, **options):
    """A call whose results are the context and its two numbers per row, with grouped queries."""
    if layout == "TND":
        options |= {"actual_seq_qlen": ENDS, "actual_seq_kvlen": ENDS}

    def function(q, k, v):
        return npu_fusion_attention(q, k, v, HEADS, layout, **options)[:3]

    return Call(f"{layout} {options}", function, lambda npu: inputs(npu, layout))


@pytest.mark.parametrize("layout", ["BSH", "SBH", "BNSD", "BSND", "TND"])
@pytest.mark.parametrize("mode", [0, 2, 3, 4])
def test_every_layout_has_its_shapes_and_gradients(layout, mode):
    limits = {"pre_tokens": 16, "next_tokens": 0} if mode == 4 else {}
    result = run_call(attend(layout, sparse_mode=mode, **limits))
    assert tuple(result.results[0].shape) == shape(layout, HEADS)
    rows = (TOKENS, HEADS, 8) if layout == "TND" else (BATCH, HEADS, LENGTH, 8)
    assert [tuple(number.shape) for number in result.results[1:]] == [rows, rows]
    assert {number.dtype for number in result.results[1:]} == {torch.float32}
    assert result.operations["npu.npu_fusion_attention_grad.default"] == 1


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("BNSD", {"sparse_mode": 5, "prefix": [8, 16]}),
        ("SBH", {"sparse_mode": 6, "prefix": [8, 16]}),
        ("TND", {"sparse_mode": 7, "pre_tokens": TOKENS, "next_tokens": 0}),
        ("TND", {"sparse_mode": 8, "pre_tokens": TOKENS, "next_tokens": 0}),
    ],
)
def test_prefixes_and_outer_parts_of_packed_sequences(layout, options):
    run_call(attend(layout, **options))


def test_slopes_go_to_the_second_version_of_the_kernel():
    with fake_npu() as npu:
        slopes = npu.tensor(HEADS, dtype=torch.float32)
        q, k, v = inputs(npu, "BNSD")
        context = npu_fusion_attention(
            q, k, v, HEADS, "BNSD", pse=slopes, pse_type=2, sparse_mode=2, q_start_idx=[0], kv_start_idx=[0]
        )[0]
        context.sum().backward()
        assert all(tensor.grad is not None for tensor in (q, k, v))
        assert (npu.count("npu_fusion_attention_v2"), npu.count("npu_fusion_attention_grad_v2")) == (1, 1)


@pytest.mark.parametrize("slopes", [False, True])
def test_backward_as_an_operator_gives_what_was_given(slopes):
    with fake_npu() as npu, torch.no_grad():
        q, k, v = inputs(npu, "BNSD")
        rows = npu.tensor(BATCH, HEADS, LENGTH, 8, dtype=torch.float32)
        facts = {"softmax_max": rows, "softmax_sum": rows, "attention_in": q, "sparse_mode": 2}
        if slopes:
            facts |= {"pse": npu.tensor(HEADS, dtype=torch.float32), "pse_type": 2}
        dq, dk, dv, dpse, dsink = npu_fusion_attention_grad(q, k, v, q, HEADS, "BNSD", **facts)
        assert [tuple(t.shape) for t in (dq, dk, dv)] == [tuple(t.shape) for t in (q, k, v)]
        assert (dpse, dsink) == (None, None)


def test_backward_as_an_operator_drops_the_weights_that_forward_dropped():
    rows, heads, width = 32, 2, 16
    options = {"keep_prob": 0.75, "sparse_mode": 2}
    torch.manual_seed(3)
    numbers = [torch.randn(1, heads, rows, width) for _ in range(4)]
    with value_device() as device:
        torch.npu.manual_seed(5)
        *leaves, outer = (tensor.to("npu").requires_grad_() for tensor in numbers)
        found = npu_fusion_attention(*leaves, heads, "BNSD", scale=0.25, **options)
        context, maximum, total, _, seed, offset, numels = found
        expected = torch.autograd.grad(context, leaves, outer)
        facts = {"softmax_max": maximum, "softmax_sum": total, "attention_in": context, "scale_value": 0.25}
        facts |= {"seed": seed, "offset": offset, "numels": numels}
        with torch.no_grad():
            gradients = npu_fusion_attention_grad(*leaves, outer, heads, "BNSD", **facts, **options)[:3]
        assert device.count("npu_fusion_attention_grad") == 2
        for mine, other in zip(gradients, expected):
            torch.testing.assert_close(mine.cpu(), other.cpu())


@pytest.mark.parametrize(("length", "kept"), [(4096, 44), (32768, 324)])
def test_backward_keeps_the_context_the_numbers_of_rows_and_one_mask(length, kept):
    """MiB beside queries, keys and values: ``2 s h`` of context, ``64 s n`` of statistics, 4 of the mask."""
    heads, width = 32, 128
    with fake_npu() as npu:
        query, key, value = (npu.tensor(length, 1, heads * width, requires_grad=True) for _ in range(3))
        storages = {}

        def keep(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            context = npu_fusion_attention(query, key, value, heads, "SBH", scale=width**-0.5, sparse_mode=2)[
                0
            ]
        given = {tensor.untyped_storage()._cdata for tensor in (query, key, value)}
        assert context.shape == query.shape
        assert sum(size for at, size in storages.items() if at not in given) == kept * 2**20


def test_the_device_is_found():
    assert device_missing("npu") == ""
