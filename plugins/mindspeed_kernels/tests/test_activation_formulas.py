"""Operators keep for backward what the formulas of their features say."""

import pytest
import torch

from mindspeed_kernels.features.activation import FusedSwiGLUFeature
from mindspeed_kernels.features.attention import FlashAttention
from mindspeed_kernels.features.norm import FusedRMSNormFeature
from mindspeed_kernels.features.other_attention import MaskedSoftmaxFeature, TriangleAttention
from mindspeed_kernels.ops import npu_fusion_attention, rms_norm, scaled_masked_softmax, swiglu
from mindspeed_kernels.ops import triangle_attention as triangle
from mindspeed_megatron.formulas import evaluate, formula_of

S, B, N, D, F = 128, 2, 4, 16, 96
ARGUMENTS = {
    "seq_length": S,
    "micro_batch_size": B,
    "num_attention_heads": N,
    "kv_channels": D,
    "hidden_size": N * D,
    "ffn_hidden_size": F,
    "triangle_block_size": 32,
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
}


def kept(function, *inputs, inputs_too=False):
    """Bytes of distinct storages that autograd keeps of a call."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function(*inputs)
    own = () if inputs_too else {tensor.untyped_storage()._cdata for tensor in inputs}
    del result
    return sum(storage.nbytes() for key, storage in found.items() if key not in own)


def made(dtype, *shape):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def attention(query, key, value):
    return npu_fusion_attention(query, key, value, N, "SBND", keep_prob=1.0, sparse_mode=2)[0]


def two_norms(dtype):
    weight = torch.ones(N * D, dtype=dtype)
    return 2 * kept(lambda x: rms_norm(x, weight, 1e-5), made(dtype, S, B, N * D), inputs_too=True) - (
        2 * weight.untyped_storage().nbytes()
    )


CASES = {
    "flash-attn": (
        FlashAttention,
        lambda dtype: kept(attention, *(made(dtype, S, B, N, D) for _ in range(3))),
    ),
    "triangle-attn": (
        TriangleAttention,
        lambda dtype: kept(
            lambda q, k, v: triangle(q, k, v, None, 32), *(made(dtype, S, B, N, D) for _ in range(3))
        ),
    ),
    "masked-softmax": (
        MaskedSoftmaxFeature,
        lambda dtype: kept(lambda x: scaled_masked_softmax(x, None, 1.0, True), made(dtype, B, N, S, S)),
    ),
    "fused-swiglu": (
        FusedSwiGLUFeature,
        lambda dtype: kept(swiglu, made(dtype, S, B, 2 * F), inputs_too=True),
    ),
    "fused-rmsnorm": (FusedRMSNormFeature, two_norms),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_formula_is_what_is_kept_for_backward(name, dtype):
    feature, measure = CASES[name]
    text = formula_of(feature, "activation_bytes", "cpu")

    assert measure(dtype) == evaluate(text, {**ARGUMENTS, "element_size": dtype.itemsize})
