"""Public operators: permutation, ring updates, rotary embedding, dropout with norm, feed-forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mindspeed_kernels.ops import ContractError
from mindspeed_kernels.ops.dropout_add_layer_norm import npu_dropout_add_layer_norm
from mindspeed_kernels.ops.dropout_add_rms_norm import npu_dropout_add_rms_norm
from mindspeed_kernels.ops.ffn import npu_ffn
from mindspeed_kernels.ops.npu_moe_token_permute import npu_moe_token_permute
from mindspeed_kernels.ops.npu_moe_token_unpermute import npu_moe_token_unpermute
from mindspeed_kernels.ops.npu_ring_attention_update import npu_ring_attention_update
from mindspeed_kernels.ops.npu_rotary_position_embedding import npu_rotary_position_embedding

FAST = settings(max_examples=25, deadline=None)


@FAST
@given(
    tokens=st.integers(1, 9), copies=st.integers(1, 3), experts=st.integers(1, 4), seed=st.integers(0, 999)
)
def test_permuted_tokens_are_sorted_by_expert_and_come_back(tokens, copies, experts, seed):
    torch.manual_seed(seed)
    x, indices = torch.randn(tokens, 4), torch.randint(experts, (tokens, copies))
    probs = torch.rand(tokens, copies)
    permuted, where = npu_moe_token_permute(x, indices)
    owners = torch.empty(tokens * copies, dtype=torch.long)
    owners[where.long()] = indices.flatten()
    assert where.dtype == torch.int32
    assert (owners.diff() >= 0).all()
    torch.testing.assert_close(permuted[where.long()], x.repeat_interleave(copies, 0))
    back = npu_moe_token_unpermute(permuted, where, probs)
    torch.testing.assert_close(back, x * probs.sum(1, keepdim=True))


@pytest.mark.parametrize("kept", [3, -2])
def test_dropped_copies_count_as_zero(kept):
    torch.manual_seed(0)
    x, indices = torch.randn(4, 6), torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])
    permuted, where = npu_moe_token_permute(x, indices, kept)
    rows = kept if kept > 0 else 8 + kept
    assert permuted.shape == (rows, 6)
    back = npu_moe_token_unpermute(permuted, where, torch.ones(4, 2))
    survived = (where.view(4, 2) < rows).sum(1, keepdim=True)
    torch.testing.assert_close(back, x * survived)


def test_gradients_of_the_permutation_reach_tokens_and_probabilities():
    torch.manual_seed(0)
    indices = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    probs = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x, probs):
        permuted, where = npu_moe_token_permute(x, indices, 6)
        return npu_moe_token_unpermute(permuted.tanh(), where, probs)

    assert torch.autograd.gradcheck(there_and_back, (x, probs))


def test_padded_indices_name_the_tokens_of_each_expert():
    x, indices = torch.randn(5, 3), torch.tensor([[0, 2], [4, 4]])
    permuted, same = npu_moe_token_permute(x, indices, padded_mode=True)
    torch.testing.assert_close(permuted, x[[0, 2, 4, 4]])
    probs = torch.rand(2, 2)
    back = npu_moe_token_unpermute(permuted, same, probs, True, (5, 3))
    expected = torch.zeros(5, 3)
    for expert in range(2):
        for place, token in enumerate(indices[expert]):
            expected[token] += x[token] * probs[expert, place]
    torch.testing.assert_close(back, expected)
    with pytest.raises(ContractError, match=r"\[E, capacity\] = \[2, 2\]"):
        npu_moe_token_unpermute(permuted, same, torch.rand(5, 2), True, (5, 3))


def attention_of(q, k, v):
    """Output ``[s, b, n d]``, max and sum ``[b, n, s, 8]`` of one block of keys."""
    scores = q @ k.transpose(-1, -2)
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    total = weights.sum(-1, keepdim=True)
    output = (weights @ v) / total
    merged = output.permute(2, 0, 1, 3).flatten(2)
    return merged, highest.expand(*highest.shape[:-1], 8), total.expand(*total.shape[:-1], 8)


@FAST
@given(order=st.permutations(range(4)), seed=st.integers(0, 999))
def test_blocks_of_keys_merge_to_the_whole_attention_in_any_order(order, seed):
    torch.manual_seed(seed)
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 4)
    blocks = [attention_of(q, keys, values) for keys, values in zip(k.chunk(4, 2), v.chunk(4, 2))]
    result = blocks[order[0]]
    for index in order[1:]:
        result = npu_ring_attention_update(*result, *blocks[index])
    whole = attention_of(q, k, v)
    torch.testing.assert_close(result[0], whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[1] + result[2].log(), whole[1] + whole[2].log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_packed_sequences_merge_like_others_in_any_order(order):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 5, 4), torch.randn(1, 3, 9, 4), torch.randn(1, 3, 9, 4)
    packed = []
    for keys, values in zip(k.chunk(3, 2), v.chunk(3, 2)):
        output, highest, total = attention_of(q, keys, values)
        packed.append((output.view(5, 3, 4), highest[0].transpose(0, 1), total[0].transpose(0, 1)))
    result = packed[order[0]]
    for index in order[1:]:
        result = npu_ring_attention_update(*result, *packed[index], torch.tensor([0, 2, 5]), "TND")
    torch.testing.assert_close(
        result[0].flatten(1), attention_of(q, k, v)[0].squeeze(1), rtol=1e-5, atol=1e-5
    )


def test_a_block_without_keys_changes_nothing_and_two_of_them_give_zero():
    torch.manual_seed(0)
    some = attention_of(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    smallest = torch.finfo(torch.float32).min
    none = torch.zeros_like(some[0]), torch.full_like(some[1], smallest), torch.zeros_like(some[2])
    for pair in ((some, none), (none, some)):
        merged = npu_ring_attention_update(*pair[0], *pair[1])
        for got, expected in zip(merged, some):
            torch.testing.assert_close(got, expected)
    nothing = npu_ring_attention_update(*none, *none)
    assert not nothing[0].any()
    assert not nothing[2].any()
    assert (nothing[1] == smallest).all()


def test_an_unknown_layout_is_refused():
    block = attention_of(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    with pytest.raises(ContractError, match="layout must be one of SBH, TND, got 'BSH'"):
        npu_ring_attention_update(*block, *block, layout="BSH")


@FAST
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6)),
    mode=st.sampled_from([0, 1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_rotation_keeps_norms_and_is_undone_by_the_opposite_angle(sizes, mode, dtype, seed):
    torch.manual_seed(seed)
    length, batch, heads, half = sizes
    x = torch.randn(length, batch, heads, 2 * half).to(dtype)
    angle = torch.randn(length, 1, 1, half)
    angle = torch.cat((angle, angle), -1) if mode == 0 else angle.repeat_interleave(2, -1)
    turned = npu_rotary_position_embedding(x, angle.cos(), angle.sin(), mode)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1), **tolerance)
    back = npu_rotary_position_embedding(turned, angle.cos(), -angle.sin(), mode)
    torch.testing.assert_close(back, x, **tolerance)


def test_rotation_is_that_of_megatron_core():
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    torch.manual_seed(0)
    x, freqs = torch.randn(7, 2, 3, 16), torch.randn(7, 1, 1, 16)
    for mode, interleaved in ((0, False), (1, True)):
        expected = _apply_rotary_pos_emb_bshd(x, freqs, rotary_interleaved=interleaved)
        got = npu_rotary_position_embedding(x, freqs.cos(), freqs.sin(), mode)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("needed", [(True, False, False), (True, True, False), (False, False, True)])
def test_rotation_has_gradients_for_each_input_alone(mode, needed):
    torch.manual_seed(0)
    tensors = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=flag)
        for shape, flag in zip(((5, 2, 2, 6), (5, 1, 1, 6), (1, 1, 1, 6)), needed)
    ]
    assert torch.autograd.gradcheck(lambda *t: npu_rotary_position_embedding(*t, mode), tensors)


@pytest.mark.parametrize(
    ("x", "cos", "mode", "message"),
    [
        ((4, 2, 2, 5), (4, 1, 1, 5), 0, "must be a multiple of 2, got 5"),
        ((4, 2, 2, 6), (3, 1, 1, 6), 0, "cos must have the sizes of x, or 1"),
        ((4, 2, 6), (4, 1, 6), 0, "x must have 4 dimensions"),
        ((4, 2, 2, 6), (4, 1, 1, 6), 2, "mode must be one of 0, 1, got 2"),
    ],
)
def test_what_the_rotation_refuses(x, cos, mode, message):
    with pytest.raises(ContractError, match=message):
        npu_rotary_position_embedding(torch.randn(*x), torch.randn(*cos), torch.randn(*cos), mode)


@pytest.mark.parametrize("function", [npu_dropout_add_layer_norm, npu_dropout_add_rms_norm])
def test_dropout_add_norm_is_its_definition(function):
    torch.manual_seed(0)
    x0, residual, weight, bias = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    rows, layer = torch.rand(2, 3), torch.randn(8)
    total = x0 * rows.unsqueeze(-1) * layer + residual
    if function is npu_dropout_add_layer_norm:
        expected = F.layer_norm(total, (8,), weight, bias, 1e-5)
    else:
        expected = F.rms_norm(total, (8,), weight, 1e-5) + bias
    norm, before, mask = function(x0, residual, weight, bias, 0.0, 1e-5, rows, layer, True, False, True)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(before, total)
    assert mask.dtype == torch.bool
    assert mask.all()


@pytest.mark.parametrize("function", [npu_dropout_add_layer_norm, npu_dropout_add_rms_norm])
def test_dropped_values_are_where_the_mask_says(function):
    torch.manual_seed(0)
    x0 = torch.ones(4, 50, 64, requires_grad=True)
    _, before, mask = function(
        x0, None, torch.ones(64), None, 0.25, 1e-5, prenorm=True, return_dropout_mask=True
    )
    torch.testing.assert_close(before, mask / 0.75)
    assert abs(float(mask.float().mean()) - 0.75) < 0.02
    before.sum().backward()
    torch.testing.assert_close(x0.grad, mask / 0.75)


def test_the_sum_before_the_norm_has_the_dtype_of_the_residual_or_float32():
    x0, weight = torch.randn(2, 3, 8).bfloat16(), torch.ones(8)
    wide = npu_dropout_add_rms_norm(x0, torch.zeros(2, 3, 8), weight, None, 0.0, 1e-5, prenorm=True)
    alone = npu_dropout_add_rms_norm(x0, None, weight, None, 0.0, 1e-5, prenorm=True, residual_in_fp32=True)
    assert [t.dtype for t in (*wide, *alone)] == [torch.bfloat16, torch.float32] * 2


def test_dropout_add_norm_refuses_a_residual_of_another_shape():
    with pytest.raises(ContractError, match="residual must have the shape of x0"):
        npu_dropout_add_rms_norm(torch.randn(2, 3, 8), torch.randn(2, 3, 4), torch.ones(8), None, 0.0, 1e-5)


@pytest.mark.parametrize("activation", ["gelu", "FastGELU", "relu", "silu", "geglu", "swiglu", "reglu"])
def test_feed_forward_is_two_products_with_an_activation_between(activation):
    torch.manual_seed(0)
    gated = activation in (
        "geglu",
        "swiglu",
        "reglu",
    )
    x, w1, w2 = torch.randn(2, 3, 8), torch.randn(8, 16), torch.randn(8 if gated else 16, 4)
    b1, b2 = torch.randn(16), torch.randn(4)
    hidden = x @ w1 + b1
    plain = {
        "gelu": F.gelu,
        "fastgelu": lambda t: t * torch.sigmoid(1.702 * t),
        "relu": F.relu,
        "silu": F.silu,
    }
    if gated:
        first, second = hidden.chunk(2, -1)
        inner = {"geglu": F.gelu, "swiglu": F.silu, "reglu": F.relu}[activation](first) * second
    else:
        inner = plain[activation.lower()](hidden)
    got = npu_ffn(x, w1, w2, activation, bias1=b1, bias2=b2)
    torch.testing.assert_close(got, inner @ w2 + b2, rtol=1e-5, atol=1e-5)


def test_experts_have_their_own_rows_by_counts_or_by_ends():
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(6, 8), torch.randn(3, 8, 16), torch.randn(3, 16, 4)
    b1 = torch.randn(3, 16)
    by_counts = npu_ffn(x, w1, w2, "relu", expert_tokens=[2, 0, 4], bias1=b1)
    by_ends = npu_ffn(x, w1, w2, "relu", expert_tokens_index=[2, 2, 6], bias1=b1)
    expected = torch.cat([F.relu(x[:2] @ w1[0] + b1[0]) @ w2[0], F.relu(x[2:] @ w1[2] + b1[2]) @ w2[2]])
    torch.testing.assert_close(by_counts, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_ends, by_counts)


def test_the_feed_forward_can_be_trained_with():
    tensors = [
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((4, 6), (2, 6, 8), (2, 8, 3))
    ]
    assert torch.autograd.gradcheck(lambda x, a, b: npu_ffn(x, a, b, "silu", expert_tokens=[1, 3]), tensors)


def test_eight_bit_weights_are_widened_first():
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    w1, w2 = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((8, 16), (16, 4)))
    s1, s2, o1, o2 = torch.rand(16) / 100, torch.rand(4) / 100, torch.randn(16), torch.randn(4)
    got = npu_ffn(
        x,
        w1,
        w2,
        "relu",
        antiquant_scale1=s1,
        antiquant_scale2=s2,
        antiquant_offset1=o1,
        antiquant_offset2=o2,
    )
    expected = F.relu(x @ ((w1 + o1) * s1)) @ ((w2 + o2) * s2)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_eight_bit_operands_are_multiplied_exactly():
    torch.manual_seed(0)
    x, w1, w2 = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((5, 8), (8, 16), (16, 4)))
    d1, d2, scale = torch.rand(16) / 1000, torch.rand(4) / 1000, torch.tensor(3.0)
    got = npu_ffn(x, w1, w2, "relu", scale=scale, deq_scale1=d1, deq_scale2=d2, output_dtype=torch.float32)
    hidden = F.relu((x.long() @ w1.long()).double() * d1.double()).float() * scale
    narrow = hidden.round().clamp(-128, 127).long()
    torch.testing.assert_close(got.double(), (narrow @ w2.long()).double() * d2.double())


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((6, 8), (8, 16), (16, 4), "tanh"), {}, "activation must be one of gelu"),
        (((6, 8), (2, 8, 16), (2, 8, 4), "swiglu"), {"expert_tokens": [2, 4]}, "swiglu takes no experts"),
        (((6, 8), (2, 8, 16), (2, 16, 4), "relu"), {}, "either expert_tokens or expert_tokens_index"),
        (((6, 8), (8, 16), (16, 4), "relu"), {"expert_tokens": [6]}, "needs weights"),
        (((6, 8), (2, 8, 16), (2, 16, 4), "relu"), {"expert_tokens": [2, 3]}, "must cover all 6 rows"),
    ],
)
def test_what_the_feed_forward_refuses(arguments, options, message):
    *shapes, activation = arguments
    with pytest.raises(ContractError, match=message):
        npu_ffn(*(torch.randn(*shape) for shape in shapes), activation, **options)
