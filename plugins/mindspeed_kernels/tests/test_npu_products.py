"""NPU backends of products and of experts' tokens on kernels that obey CANN's contracts, on the CPU."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_kernels.ops import availability
from mindspeed_kernels.ops.ffn import npu_ffn
from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.overlapped_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from mindspeed_kernels.ops.quant_gmm import quant_grouped_matmul
from mindspeed_kernels.ops.weight_quant_gmm import weight_quant_grouped_matmul
from mindspeed_testing import run_world
from mindspeed_testing.npu.kernels.communicators import communicator_name
from mindspeed_testing.npu.stand_in import kernels_on_cpu

SCHEMAS = Path(__file__).resolve().parents[3] / "tests" / "npu_conformance" / "schemas.json"
CASES = settings(max_examples=40, deadline=None)
COUNTS = st.lists(st.integers(0, 4), min_size=2, max_size=5)


@pytest.fixture(autouse=True)
def calls():
    with kernels_on_cpu(SCHEMAS) as found:
        yield found


def on_npu(operator, backend="npu"):
    return operator.backends[backend].function


def leaves(*tensors):
    return [tensor.clone().requires_grad_() for tensor in tensors]


@CASES
@given(
    counts=COUNTS,
    k=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    transposed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_grouped_products_and_gradients_equal_the_definition(counts, k, dtype, transposed, seed):
    torch.manual_seed(seed)
    ends = torch.tensor(counts).cumsum(0)
    x, weight = torch.randn(sum(counts), k, dtype=dtype), torch.randn(len(counts), k, 5, dtype=dtype)
    x = x.t().contiguous().t() if transposed else x
    outer = torch.randn(sum(counts), 5, dtype=dtype)
    found = []
    for function in (on_npu(grouped_matmul), grouped_matmul.reference):
        inputs = leaves(x, weight)
        result = function(*inputs, ends)
        result.backward(outer)
        found.append((result.detach(), *(leaf.grad for leaf in inputs)))
    for got, expected in zip(*found):
        torch.testing.assert_close(got, expected)


def test_the_weights_of_a_rank_without_any_token_have_zero_gradients(calls):
    x, weight = leaves(torch.randn(0, 4), torch.randn(3, 4, 6))
    on_npu(grouped_matmul)(x, weight, torch.zeros(3, dtype=torch.int64)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3, 4, 6))


@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 3, 2], [0, 0, 0], [5]])
def test_weight_gradients_are_added_whatever_the_dtype_and_the_rows(counts, operands):
    torch.manual_seed(0)
    ends = torch.tensor(counts).cumsum(0)
    x, dy = torch.randn(sum(counts), 4, dtype=operands), torch.randn(sum(counts), 6, dtype=operands)
    given = torch.randn(len(counts), 4, 6)
    got, expected = given.clone(), given.clone()
    call = replace(npu_groupmatmul_add_fp32.call_of(x, dy, ends, got), device="npu")
    chosen = npu_groupmatmul_add_fp32.backends
    name = "in-place" if chosen["npu"].refusal(call) else "npu"
    assert name == ("npu" if operands == torch.bfloat16 else "in-place")
    chosen[name].function(x, dy, ends, got)
    npu_groupmatmul_add_fp32.reference(x, dy, ends, expected)
    torch.testing.assert_close(got, expected)


def test_one_gradient_is_added_by_the_library_s_kernel_unless_there_are_no_rows(calls):
    x, dy = torch.randn(6, 4).bfloat16(), torch.randn(6, 3).bfloat16()
    got, expected = torch.ones(3, 4), torch.ones(3, 4)
    on_npu(npu_matmul_add_fp32, "atb")(x, dy, got)
    npu_matmul_add_fp32.reference(x, dy, expected)
    torch.testing.assert_close(got, expected)
    on_npu(npu_matmul_add_fp32, "atb")(x[:0], dy[:0], got)
    torch.testing.assert_close(got, expected)
    assert calls["_npu_matmul_add_fp32"] == 1


@pytest.mark.parametrize(
    ("device", "missing"),
    [("Ascend910B1", ""), ("Ascend950PR_9599", "there is no such kernel for Ascend 950")],
)
def test_the_library_s_kernel_is_left_out_where_it_does_not_exist(monkeypatch, device, missing):
    monkeypatch.setattr(torch, "npu", SimpleNamespace(get_device_name=lambda: device), raising=False)
    availability.ascend_generation.cache_clear()
    try:
        assert npu_matmul_add_fp32.backends["atb"].available() == missing
    finally:
        availability.ascend_generation.cache_clear()


def integers(*shape, dtype=torch.int8):
    return torch.randint(-9, 9, shape, dtype=dtype)


@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16, torch.int64])
def test_quantized_products_equal_the_definition(scale):
    torch.manual_seed(1)
    x, weight, ends = integers(7, 8), integers(3, 8, 5), torch.tensor([2, 2, 7])
    table = torch.rand(3, 5) / 9
    bias = integers(3, 5, dtype=torch.int32)
    if scale == torch.int64:
        given = (x, weight, table.view(torch.int32).long() & 0xFFFFFFFF, ends, None, bias)
    else:
        given = (x, weight, table.to(scale), ends, torch.rand(7), bias, None, 5)
    torch.testing.assert_close(on_npu(quant_grouped_matmul)(*given), quant_grouped_matmul.reference(*given))


def test_widened_weights_equal_the_definition():
    torch.manual_seed(2)
    x, weight, ends = torch.randn(7, 8).bfloat16(), integers(3, 8, 5), torch.tensor([2, 2, 7])
    tables = torch.rand(3, 5).bfloat16(), torch.rand(3, 5).bfloat16()
    given = (x, weight, *tables, ends, torch.rand(3, 5))
    got = on_npu(weight_quant_grouped_matmul)(*given)
    torch.testing.assert_close(got, weight_quant_grouped_matmul.reference(*given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("experts", [None, [2, 0, 4]])
@pytest.mark.parametrize("activation", ["GELU", "silu", "swiglu"])
@pytest.mark.parametrize("precise", [None, 0, 1])
def test_two_products_equal_the_definition(dtype, experts, activation, precise):
    if experts and activation == "swiglu":
        return
    torch.manual_seed(3)
    halves = 2 if activation == "swiglu" else 1
    many = (3,) if experts else ()
    weights = torch.randn(*many, 8, 16 * halves, dtype=dtype), torch.randn(*many, 16, 8, dtype=dtype)
    options = {
        "expert_tokens": experts,
        "bias1": torch.randn(*many, 16 * halves, dtype=dtype),
        "bias2": torch.randn(*many, 8, dtype=dtype),
        "inner_precise": precise,
    }
    x = torch.randn(6, 8, dtype=dtype)
    got = on_npu(npu_ffn)(x, *weights, activation, **options)
    torch.testing.assert_close(
        got, npu_ffn.reference(x, *weights, activation, **options), rtol=0.02, atol=0.3
    )


@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("experts", [None, [4, 0, 12, 0]])
def test_integers_of_experts_are_quantized_by_each_expert_s_scale(experts, per_column):
    torch.manual_seed(4)
    many = (4,) if experts else ()  # As many experts as there are columns: a mixed-up axis would fit.
    x, weights = integers(16, 3), (integers(*many, 3, 4), integers(*many, 4, 3))
    rows = len(experts) if experts else 1
    shape = (*many, 4) if per_column else (rows,)
    options = {
        "expert_tokens": experts,
        "scale": torch.rand(*shape) + 0.5,
        "offset": torch.rand(rows),
        "deq_scale1": torch.rand(*many, 4) / 4,
        "deq_scale2": torch.rand(*many, 3) / 4,
    }
    got = on_npu(npu_ffn)(x, *weights, "relu", **options)
    expected = npu_ffn.reference(x, *weights, "relu", **options)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def products_on_two_ranks():
    """Gather, sum and scatter on kernels with built-in communication, and without where there is none."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    for name in ("overlapped_matmul", "npu_mm_all_reduce_add_rms_norm"):
        sys.modules[f"mindspeed_kernels.ops.{name}"].hccl_name = communicator_name
    for width, fused in ((256, True), (64, False)):
        with kernels_on_cpu(SCHEMAS) as calls:
            for operator in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce):
                torch.manual_seed(rank)
                x, weight = torch.randn(4, width).bfloat16(), torch.randn(width, 256).bfloat16() / 16
                found = []
                for backend in ("mc2", "parts"):
                    function = operator.backends[backend].function
                    inputs = leaves(x.t().contiguous().t(), weight)
                    result = function(*inputs, None, group)
                    result = result[0] if isinstance(result, tuple) else result
                    result.sum().backward()
                    found.append((result.detach(), *(leaf.grad for leaf in inputs)))
                for got, expected in zip(*found):
                    torch.testing.assert_close(got, expected, rtol=0.03, atol=0.3)
            assert calls["npu_mm_all_reduce_base"] == 1
            # Forward of one is backward of the other, and sums over the other dimension.
            assert calls["npu_all_gather_base_mm"] == (2 if fused else 1)
            assert calls["npu_mm_reduce_scatter_base"] == (2 if fused else 1)
    check_sum_and_norm(group)


def check_sum_and_norm(group):
    torch.manual_seed(dist.get_rank())
    x, weight = torch.randn(2, 3, 64).bfloat16(), torch.randn(64, 32).bfloat16() / 8
    tables = torch.rand(2, 32).bfloat16(), torch.rand(2, 32).bfloat16()
    residual, gamma = torch.randn(2, 3, 32).bfloat16(), torch.rand(32).bfloat16()
    integer, scale = integers(64, 32), torch.rand(32).bfloat16() / 64
    for operands in (
        {"x1": x, "x2": weight, "bias": torch.randn(32).bfloat16()},
        {"x1": x, "x2": integer, "antiquant_scale": tables[0], "antiquant_offset": tables[1],
         "antiquant_group_size": 32},
        {"x1": integers(2, 3, 64), "x2": integer, "dequant_scale": scale},
    ):  # fmt: skip
        operator = npu_mm_all_reduce_add_rms_norm
        with kernels_on_cpu(SCHEMAS):
            got = operator.backends["npu"].function(**operands, residual=residual, gamma=gamma, hcom=group)
        expected = operator.reference(**operands, residual=residual, gamma=gamma, hcom=group)
        for one, other in zip(got, expected):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.5)


def test_products_with_communication_keep_the_kernels_ranges():
    run_world(products_on_two_ranks, 2)
