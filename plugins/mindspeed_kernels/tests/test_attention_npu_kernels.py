"""Attention on NPUs, on the kernels as their contracts state them: what would train wrong without a word."""

import logging
from itertools import accumulate

import pytest
import torch
from attention_kernels import attention_kernels, compare, in_layout, tensors

from mindspeed_kernels.attention import npu_limits
from mindspeed_kernels.ops import (
    ContractError,
    npu_fusion_attention,
    npu_fusion_attention_grad,
    npu_ring_attention_update,
)
from mindspeed_testing.npu.kernels import all_kernels
from mindspeed_testing.npu.kernels.attention_call import packed_bits
from mindspeed_testing.npu.kernels.contract import KernelRefusal


def packed(lengths, n=2, g=1, dtype=torch.float32, rest=0):
    queries, keys = (sum(pair[side] for pair in lengths) for side in (0, 1))
    ends = [list(accumulate(pair[side] for pair in lengths)) + [0] * bool(rest) for side in (0, 1)]
    given = {"actual_seq_qlen": ends[0], "actual_seq_kvlen": ends[1]}
    return tensors((1, n, g, queries + rest, keys + rest, 8, 8), dtype), given


def test_rows_without_keys_are_zero_and_so_are_their_gradients():
    mask = torch.zeros(6, 7, dtype=torch.bool)
    mask[2] = True
    calls = compare(tensors((1, 2, 1, 6, 7, 8, 8)), 2, "BNSD", {"atten_mask": mask, "sparse_mode": 1})
    assert calls["npu_fusion_attention"] == 1


def test_a_row_without_keys_is_an_average_on_the_kernel_alone():
    q, k, v = tensors((1, 1, 1, 2, 3, 8, 8))
    mask = torch.tensor([[False, False, True], [True, True, True]])
    with attention_kernels():
        import torch_npu

        found = torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=mask, sparse_mode=1)
        torch.testing.assert_close(found[0][0, 0, 1], v[0, 0].mean(0))
        zero = torch_npu.npu_fusion_attention(
            q, k, v, 1, "BNSD", atten_mask=mask, sparse_mode=1, inner_precise=2
        )
    assert not zero[0][0, 0, 1].any()
    assert float(zero[2][0, 0, 1, 0]) == torch.finfo(torch.float32).max


@pytest.mark.parametrize("second", [False, True])
def test_statistics_of_packed_sequences_stand_by_token(second):
    inputs, ends = packed([(3, 3), (2, 4)])
    options = {**ends, "sparse_mode": 3, **({"q_start_idx": 0, "kv_start_idx": 0} if second else {})}
    compare(inputs, 2, "TND", options)
    with attention_kernels():
        import torch_npu

        q, k, v = (in_layout(tensor, "TND") for tensor in inputs)
        plain = torch_npu.npu_fusion_attention(q, k, v, 2, "TND", **ends)
        wanted = npu_fusion_attention(q, k, v, 2, "TND", **ends)[1]
        # The kernel's own order is that of [n, s] for each sequence.
        assert not torch.allclose(plain[1], wanted)
        torch.testing.assert_close(plain[1].view(-1, 8)[:6].view(2, 3, 8).transpose(0, 1), wanted[:3])


@pytest.mark.parametrize("second", [False, True])
def test_gradients_of_packed_sequences_take_statistics_by_token(second):
    inputs, ends = packed([(3, 3), (2, 4)])
    q, k, v = (in_layout(tensor, "TND") for tensor in inputs)
    dy = torch.randn(q.shape)
    options = {**ends, "sparse_mode": 3, **({"q_start_idx": 0, "kv_start_idx": 0} if second else {})}
    result = npu_fusion_attention(q, k, v, 2, "TND", **options)
    facts = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0]}
    with torch.no_grad():
        expected = npu_fusion_attention_grad(q, k, v, dy, 2, "TND", **facts, **options)
        with attention_kernels() as calls:
            got = npu_fusion_attention_grad(q, k, v, dy, 2, "TND", **facts, **options)
    assert calls["npu_fusion_attention_grad" + ("_v2" if second else "")] == 1
    torch.testing.assert_close(list(got[:3]), list(expected[:3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("soc", ["910B", "950"])
def test_a_sink_in_bfloat16_trains(soc):
    sink = torch.randn(2).bfloat16()
    options = {"sink": sink, "sparse_mode": 2}
    calls = compare(tensors((1, 2, 1, 5, 5, 8, 8), torch.bfloat16), 2, "SBH", options, soc)
    assert calls == {"npu_fusion_attention_v2": 1, "npu_fusion_attention_grad_v2": 1}


def test_the_gradient_of_a_sink_is_an_output_of_the_backward_operator():
    q, k, v = tensors((1, 2, 1, 5, 5, 8, 8), torch.bfloat16)
    sink, dy = torch.randn(2).bfloat16(), torch.randn_like(q)
    result = npu_fusion_attention(q, k, v, 2, "BNSD", sink=sink)
    facts = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0], "sink": sink}
    with torch.no_grad():
        expected = npu_fusion_attention_grad(q, k, v, dy, 2, "BNSD", **facts)[4]
        with attention_kernels() as calls:
            got = npu_fusion_attention_grad(q, k, v, dy, 2, "BNSD", **facts)[4]
    assert calls["npu_fusion_attention_grad_v2"] == 1
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def test_given_dropped_weights_are_the_same_in_backward_although_the_kernel_would_draw_others():
    kept = torch.rand(1, 2, 5, 5) < 0.5
    options = {"dropout_mask": kept, "keep_prob": 0.5}
    inputs = tensors((1, 2, 1, 5, 5, 8, 8))
    assert not compare(inputs, 2, "BNSD", options)
    q, k, v = inputs
    result = npu_fusion_attention(q, k, v, 2, "BNSD", **options)
    facts = {"softmax_max": result[1], "softmax_sum": result[2], "attention_in": result[0]}
    with torch.no_grad(), attention_kernels() as calls:
        got = npu_fusion_attention_grad(q, k, v, torch.ones_like(q), 2, "BNSD", **facts, **options)
    expected = npu_fusion_attention_grad(q, k, v, torch.ones_like(q), 2, "BNSD", **facts, **options)
    assert not calls
    torch.testing.assert_close(list(got[:3]), list(expected[:3]))


def test_the_kernel_reads_a_dropout_mask_as_bits():
    q, k, v = tensors((1, 1, 1, 4, 8, 8, 8))
    kept = torch.rand(1, 1, 4, 8) < 0.5
    expected = npu_fusion_attention(q, k, v, 1, "BNSD", keep_prob=0.5, dropout_mask=kept)[0]
    with attention_kernels():
        import torch_npu

        given = {"keep_prob": 0.5, "seed": 3, "offset": 0}
        with pytest.raises(KernelRefusal, match="dropout_mask is uint8"):
            torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", dropout_mask=kept, **given)
        bits = packed_bits(kept)
        got = torch_npu.npu_fusion_attention(q, k, v, 1, "BNSD", dropout_mask=bits, **given)[0]
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("soc", ["910B", "950"])
@pytest.mark.parametrize("starts", [{}, {"q_start_idx": 0, "kv_start_idx": 0}])
def test_random_dropout_differs_between_calls_and_is_the_same_in_backward(starts, soc):
    inputs = tensors((1, 1, 1, 64, 64, 8, 8))
    value = torch.ones_like(inputs[2]).requires_grad_()
    with attention_kernels(soc) as calls:
        found = [
            npu_fusion_attention(*inputs[:2], value, 1, "BNSD", keep_prob=0.7, **starts)[0] for _ in range(2)
        ]
        assert not torch.equal(*found)
        found[0].sum().backward()
    assert sum(calls.values()) == 3
    assert abs(float(value.grad.sum() - found[0].detach().sum())) < 1e-2


@pytest.mark.parametrize("ends", [[3, 5], [3], None])
def test_ends_that_are_short_or_missing_are_refused_as_on_cpu(ends):
    inputs, given = packed([(3, 3), (4, 4)])
    inputs = [in_layout(tensor, "TND") for tensor in inputs]
    given |= {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
    with pytest.raises(ContractError, match="actual_seq_qlen"):
        npu_fusion_attention(*inputs, 2, "TND", **given)
    with attention_kernels(), pytest.raises(ContractError, match="actual_seq_qlen"):
        npu_fusion_attention(*inputs, 2, "TND", **given)


def test_tokens_behind_trailing_zeros_take_no_part():
    inputs, ends = packed([(3, 3), (2, 4)], rest=3)
    calls = compare(inputs, 2, "TND", {**ends, "sparse_mode": 3})
    assert calls["npu_fusion_attention"] == 1
    leaves = [in_layout(tensor, "TND").requires_grad_() for tensor in inputs]
    context = npu_fusion_attention(*leaves, 2, "TND", sparse_mode=3, **ends)[0]
    context.sum().backward()
    assert not context[5:].any()
    assert all(not leaf.grad[used:].any() for leaf, used in zip(leaves, (5, 7, 7)))


def test_the_kernel_leaves_tokens_behind_the_last_sequence_unwritten():
    inputs, ends = packed([(3, 3)], rest=2)
    with attention_kernels():
        import torch_npu

        found = torch_npu.npu_fusion_attention(*(in_layout(t, "TND") for t in inputs), 2, "TND", **ends)
    assert found[0][3:].isnan().all()


def test_a_bias_that_learns_gets_its_gradient_although_the_kernel_writes_none():
    q, k, v = tensors((1, 2, 1, 5, 5, 8, 8))
    found = []
    for device in ("cpu", "npu"):
        pse = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if device == "cpu":
            npu_fusion_attention(q, k, v, 2, "BNSD", pse=pse)[0].square().sum().backward()
        else:
            with attention_kernels():
                npu_fusion_attention(q, k, v, 2, "BNSD", pse=pse)[0].square().sum().backward()
        found.append(pse.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("shape", "heads", "layout", "options"),
    [
        ((2, 2, 1, 4, 5, 8, 8), 2, "BNSD", {"atten_mask": torch.zeros(2, 1, 1, 5, dtype=torch.bool)}),
        ((2, 2, 1, 4, 5, 8, 8), 2, "BNSD", {"atten_mask": torch.zeros(2, 4, 5, dtype=torch.bool)}),
        ((2, 2, 1, 4, 5, 8, 8), 2, "BNSD", {"atten_mask": torch.zeros(4, 5)}),
        ((2, 2, 1, 4, 5, 8, 8), 3, "BNSD", {}),
        ((2, 2, 1, 4, 5, 8, 8), 2, "BNSD", {"pse": torch.zeros(2, 4, 5)}),
        ((2, 2, 1, 4, 5, 8, 8), 2, "BNSD", {"pse": torch.zeros(2, 3), "pse_type": 2}),
    ],
)
def test_masks_and_biases_that_do_not_fit_are_refused_as_on_cpu(shape, heads, layout, options):
    inputs = tensors(shape)
    with pytest.raises(ContractError) as plain:
        npu_fusion_attention(*inputs, heads, layout, **options)
    with attention_kernels(), pytest.raises(ContractError) as found:
        npu_fusion_attention(*inputs, heads, layout, **options)
    assert str(found.value) == str(plain.value)


def test_what_the_kernel_cannot_compute_is_said_once(caplog):
    npu_limits.warn_of.cache_clear()
    slopes = torch.rand(2)
    with caplog.at_level(logging.WARNING, "mindspeed_kernels.ops"):
        for _ in range(2):
            assert not compare(tensors((1, 2, 1, 4, 6, 8, 8)), 2, "BNSD", {"pse": slopes, "pse_type": 2})
    (record,) = caplog.records
    assert "it knows distances of as many queries as keys only" in record.message


def test_statements_about_kernels_name_their_sources():
    for name in ("npu_fusion_attention", "npu_fusion_attention_grad_v2", "npu_ring_attention_update"):
        kernel = all_kernels()[f"npu::{name}"]
        assert kernel.sources
        assert kernel.rules


def rows(*shape, seen=True):
    """A maximum and a sum of every row, eight times each."""
    highest, total = torch.randn(*shape, 1), torch.rand(*shape, 1) + 0.5
    if not seen:
        highest, total = torch.full_like(highest, torch.finfo(torch.float32).min), torch.zeros_like(total)
    return [number.expand(*shape, 8).contiguous() for number in (highest, total)]


@pytest.mark.parametrize("width", [64, 40])
@pytest.mark.parametrize("layout", ["SBH", "TND"])
def test_an_update_is_that_of_cpu_where_rows_saw_nothing(layout, width):
    torch.manual_seed(0)
    if layout == "SBH":
        outputs, shape, given = [torch.randn(5, 2, 3 * width) for _ in range(2)], (2, 3, 5), {}
    else:
        outputs, shape = [torch.randn(7, 3, width) for _ in range(2)], (7, 3)
        given = {"actual_seq_qlen": torch.tensor([0, 3, 7]), "layout": "TND"}
    before, now, nothing = rows(*shape), rows(*shape), rows(*shape, seen=False)
    outputs = [tensor.view(*tensor.shape[:2], 3, -1) if layout == "SBH" else tensor for tensor in outputs]
    for side, which in ((before, (2, 4)), (now, (3, 4))):
        for row in which:
            if layout == "SBH":
                for mine, none in zip(side, nothing):
                    mine[:, :, row] = none[:, :, row]
            else:
                for mine, none in zip(side, nothing):
                    mine[row] = none[row]
    for output, which in zip(outputs, ((2, 4), (3, 4))):
        output[list(which)] = 0.0
    outputs = [tensor.flatten(2) if layout == "SBH" else tensor for tensor in outputs]
    arguments = (outputs[0], *before, outputs[1], *now)
    expected = npu_ring_attention_update(*arguments, **given)
    with attention_kernels() as calls:
        got = npu_ring_attention_update(*arguments, **given)
    assert calls["npu_ring_attention_update"] == (0 if (layout, width) == ("TND", 40) else 1)
    torch.testing.assert_close(list(got), [item.contiguous() for item in expected])
