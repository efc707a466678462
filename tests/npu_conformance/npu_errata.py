"""Errors and surprises of torch_npu 2.13.0; a test that fails here means that a release has fixed one."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch_npu

from mindspeed_testing.npu import Call, fake_npu, run_call, run_calls
from mindspeed_testing.npu.contracts import UNUSED
from mindspeed_testing.npu.kernels import all_kernels


def attention_inputs(npu, layout="BNSD", **kwargs):
    shapes = {"BNSD": (2, 4, 64, 32), "BSND": (2, 64, 4, 32), "TND": (128, 4, 32), "SBH": (64, 2, 128)}
    return [npu.tensor(*shapes[layout], **kwargs) for _ in range(3)]


def schema(name):
    return str(getattr(torch.ops.npu, name).default._schema)


@pytest.mark.parametrize(
    "call",
    [
        Call(
            "npu_grouped_matmul",
            lambda x, w, ends: torch_npu.npu_grouped_matmul(
                [x], [w], group_list=ends, split_item=3, group_type=0
            )[0],
            lambda npu: (
                npu.tensor(8, 16, requires_grad=True),
                npu.tensor(2, 16, 4, requires_grad=True),
                npu.tensor(2, dtype=torch.int64),
            ),
        ),
        Call(
            "npu_ring_attention_update",
            lambda *tensors: torch_npu.npu_ring_attention_update(*tensors),
            lambda npu: tuple(
                npu.tensor(*shape, dtype=dtype, requires_grad=True)
                for shape, dtype in 2
                * [
                    ((64, 2, 128), torch.bfloat16),
                    ((2, 4, 64, 8), torch.float32),
                    ((2, 4, 64, 8), torch.float32),
                ]
            ),
        ),
        Call(
            "npu_ffn",
            lambda x, w1, w2: torch_npu.npu_ffn(x, w1, w2, "gelu", inner_precise=0),
            lambda npu: tuple(npu.tensor(8, 8, requires_grad=True) for _ in range(3)),
        ),
    ],
    ids=lambda call: call.name,
)
def test_operations_without_a_formula_lose_gradients_and_say_nothing(call):
    with pytest.raises(AssertionError, match="gets no gradient"):
        run_call(call)


def test_add_rms_norm_has_no_derivative():
    with fake_npu() as npu:
        x, residual = npu.tensor(4, 8, requires_grad=True), npu.tensor(4, 8, requires_grad=True)
        result = torch_npu.npu_add_rms_norm(x, residual, npu.tensor(8))[0]
        with pytest.raises(RuntimeError, match="not implemented"):
            result.sum().backward()


def test_add_layer_norm_has_no_shapes_for_its_backward():
    with fake_npu(shapes={}) as npu:
        x = npu.tensor(4, 8, requires_grad=True)
        result = torch_npu.npu_add_layer_norm(x, npu.tensor(4, 8), npu.tensor(8), npu.tensor(8), 1e-5, True)[
            0
        ]
        with pytest.raises(Exception, match="npu_add_layer_norm_backward"):
            result.sum().backward()


def test_the_second_attention_has_broken_shapes_for_its_backward():
    with fake_npu(shapes={}) as npu:
        q, k, v = attention_inputs(npu, requires_grad=True)
        result = torch_npu.npu_fusion_attention_v2(q, k, v, 4, "BNSD")[0]
        with pytest.raises(TypeError, match="empty_like"):
            result.sum().backward()


def test_a_cast_of_the_memory_format_has_no_shapes():
    with fake_npu(shapes={}) as npu, pytest.raises(Exception, match="npu_format_cast"):
        torch.ops.npu.npu_format_cast(npu.tensor(4, 8), 2)
    with fake_npu() as npu:
        assert torch.ops.npu.npu_format_cast(npu.tensor(4, 8), 2).shape == (4, 8)


def test_what_has_no_shapes_has_them_from_us():
    def normed(x1, x2, gamma, beta):
        return torch_npu.npu_add_layer_norm(x1, x2, gamma, beta, 1e-5, True)[0]

    def attended(q, k, v):
        return torch_npu.npu_fusion_attention_v2(q, k, v, 4, "BNSD")[0]

    shapes = ((4, 8), (4, 8), (8,), (8,))
    norms = Call("norm", normed, lambda npu: [npu.tensor(*s, requires_grad=True) for s in shapes])
    attention = Call("attention", attended, lambda npu: attention_inputs(npu, requires_grad=True))
    run_calls([norms, attention])


def test_the_second_attention_has_wrong_shapes_of_its_statistics():
    with fake_npu(shapes={}) as npu:
        ends = [64, 128]
        tensors = attention_inputs(npu, "TND")
        options = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}
        first = torch_npu.npu_fusion_attention(*tensors, 4, "TND", **options)[1]
        second = torch_npu.npu_fusion_attention_v2(*tensors, 4, "TND", **options)[1]
        assert tuple(first.shape) == (128, 4, 8)
        assert tuple(second.shape) != tuple(first.shape)
    with fake_npu() as npu:
        second = torch_npu.npu_fusion_attention_v2(*attention_inputs(npu, "TND"), 4, "TND", **options)[1]
        assert tuple(second.shape) == (128, 4, 8)


def test_the_second_attention_takes_values_to_be_as_wide_as_queries():
    for shapes, width in (({}, 16), (None, 8)):
        with fake_npu() if shapes is None else fake_npu(shapes=shapes) as npu:
            q, k = npu.tensor(1, 2, 8, 16), npu.tensor(1, 2, 8, 16)
            context = torch_npu.npu_fusion_attention_v2(q, k, npu.tensor(1, 2, 8, 8), 2, "BNSD")[0]
            assert context.shape[3] == width


def test_shape_functions_accept_layouts_and_dtypes_that_do_not_exist():
    with fake_npu(rules=False) as npu:
        q, k, v = attention_inputs(npu)
        torch_npu.npu_fusion_attention(q, k.float(), v, 4, "NOPE")
        torch_npu.npu_rotary_mul(npu.tensor(4, 8, 16), npu.tensor(1, 1, 16), npu.tensor(1, 1, 16))


def test_the_two_attentions_spell_their_windows_differently():
    assert "pre_tockens" in schema("npu_fusion_attention")
    assert "pre_tokens" in schema("npu_fusion_attention_v2")
    assert "pre_tockens" not in schema("npu_fusion_attention_v2")


def test_ffn_takes_the_tokens_of_experts_as_numbers():
    assert "SymInt[]? expert_tokens" in schema("npu_ffn") or "int[]? expert_tokens" in schema("npu_ffn")


def test_ring_attention_update_names_its_layouts_otherwise():
    assert "input_layout" in schema("npu_ring_attention_update")
    assert "input_softmax_layout" in schema("npu_ring_attention_update")


def test_permute_with_a_routing_map_counts_tokens_without_their_copies():
    with fake_npu() as npu:
        tokens, routing = npu.tensor(6, 8), npu.tensor(6, 4, dtype=torch.bool)
        permuted = torch_npu.npu_moe_token_permute_with_routing_map(tokens, routing)[0]
        assert permuted.shape[0] == 6


@pytest.mark.parametrize("name", chain.from_iterable(UNUSED.values()))
def test_kernels_that_nothing_here_calls_exist_without_a_contract(name):
    assert hasattr(torch.ops.npu, name)
    assert f"npu::{name}" not in all_kernels()


def test_sparse_attention_with_shared_keys_and_values_has_no_kernel():
    assert [name for name in dir(torch_npu) if "shared_kv" in name or "sharedkv" in name] == []
