"""Our contracts refuse what torch_npu's shape functions let through and a kernel would compute wrongly."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from mindspeed_kernels.ops import BackendError, ContractError, rms_norm, swiglu, use
from mindspeed_kernels.ops.fusion_attention import npu_fusion_attention
from mindspeed_kernels.ops.npu_rotary_position_embedding import npu_rotary_position_embedding
from mindspeed_testing.npu import fake_npu


@pytest.fixture
def npu():
    with fake_npu(rules=False) as fake:
        yield fake


def heads(npu, **options):
    return [npu.tensor(2, 4, 64, 32, **options) for _ in range(3)]


def test_a_layout_that_does_not_exist(npu):
    torch_npu.npu_fusion_attention(*heads(npu), 4, "SBN")
    with pytest.raises(ContractError, match="input_layout"):
        npu_fusion_attention(*heads(npu), 4, "SBN")


def test_mixed_dtypes(npu):
    q, k, v = heads(npu)
    torch_npu.npu_fusion_attention(q, k.float(), v, 4, "BNSD")
    with pytest.raises(ContractError, match="dtype"):
        npu_fusion_attention(q, k.float(), v, 4, "BNSD")


def test_a_rotary_input_of_the_wrong_rank(npu):
    x, angle = npu.tensor(4, 8, 16), npu.tensor(1, 1, 16)
    torch_npu.npu_rotary_mul(x, angle, angle)
    with pytest.raises(ContractError, match="npu_rotary_position_embedding"):
        npu_rotary_position_embedding(x, angle, angle)


def test_a_scale_of_another_width(npu):
    with pytest.raises(ContractError, match="gamma"):
        rms_norm(npu.tensor(4, 8), npu.tensor(7))


def test_gate_and_value_of_different_widths(npu):
    with pytest.raises(ValueError, match="even"):
        swiglu(npu.tensor(4, 7))


def test_a_dtype_that_the_kernel_does_not_know(npu):
    x = npu.tensor(4, 8, dtype=torch.float64)
    swiglu(x)
    assert npu.count("npu_swiglu") == 0
    with pytest.raises(BackendError, match="float64"), use(swiglu="npu"):
        swiglu(x)
