"""The norm that works without TransformerEngine and Apex."""

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from mindspeed_megatron.plain_norm import PlainNorm


def norm(size=8, **changes):
    config = TransformerConfig(num_layers=1, hidden_size=size, **{"num_attention_heads": 2, **changes})
    return PlainNorm(config, size, eps=1e-5)


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_values_are_those_of_torch(normalization):
    x = torch.randn(4, 2, 8)
    expected = {"LayerNorm": torch.nn.LayerNorm(8), "RMSNorm": torch.nn.RMSNorm(8, eps=1e-5)}[normalization]
    torch.testing.assert_close(norm(normalization=normalization)(x), expected(x))


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centred_gamma_starts_as_the_identity_scale(normalization):
    x = torch.randn(4, 2, 8)
    centred = norm(normalization=normalization, layernorm_zero_centered_gamma=True)
    assert centred.weight.abs().max() == 0
    torch.testing.assert_close(centred(x), norm(normalization=normalization)(x))


def test_parameters_are_marked_for_sequence_parallelism():
    marked = norm(sequence_parallel=True, tensor_model_parallel_size=2, num_attention_heads=2)
    assert all(parameter.sequence_parallel for parameter in marked.parameters())
    assert not any(parameter.sequence_parallel for parameter in norm().parameters())


def test_parameter_names_are_those_of_the_torch_norms():
    assert set(norm(normalization="LayerNorm").state_dict()) == {"weight", "bias"}
    assert set(norm(normalization="RMSNorm").state_dict()) == {"weight"}


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_residual_stream_in_float32_is_normalized_in_float32(normalization):
    x = torch.randn(4, 2, 8) * 100
    small = norm(normalization=normalization).bfloat16()
    result = small(x)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, norm(normalization=normalization)(x).bfloat16())
