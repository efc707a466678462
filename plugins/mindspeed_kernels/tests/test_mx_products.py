"""Grouped products in MX formats: rounding by torch's own float8, each gradient's rounding, refusals."""

import pytest
import torch

from mindspeed_kernels.ops import ContractError, gmm_w4a8, npu_quant_group_gemm
from mindspeed_kernels.ops.mx_formats import E2M1, E4M3, E5M2, mx_rounded, mx_rounded_groups

COUNTS = [40, 0, 3]
FORMATS = {"E4M3": (E4M3, E4M3), "HYBRID": (E4M3, E5M2)}


def by_torch(x, axis, form):
    """Blocks along an axis, each divided by a power of two and rounded by torch."""
    blocks = []
    for block in x.double().split(32, axis):
        largest = block.abs().amax(axis, keepdim=True)
        scale = torch.exp2(torch.floor(torch.log2(largest)) - form.most_exponent)
        scale = torch.where(largest > 0, scale, 1.0)
        scaled = (block / scale).clamp(-form.largest, form.largest).float()
        blocks.append(scaled.to(form.dtype).double() * scale)
    return torch.cat(blocks, axis)


@pytest.mark.parametrize("form", [E4M3, E5M2], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_are_rounded_as_torch_rounds_them_by_their_own_power_of_two(form, axis, dtype):
    torch.manual_seed(0)
    x = (torch.randn(70, 5, 33) * torch.exp2(torch.randint(-12, 12, (70, 5, 33)))).to(dtype)
    x[:32, 2] = 0
    assert torch.equal(mx_rounded(x, axis, form).double(), by_torch(x, axis, form))


def test_what_is_above_the_largest_number_becomes_the_largest():
    x = torch.tensor([500.0, 448.0, 449.0, -511.0])
    assert mx_rounded(x, 0, E4M3).tolist() == [448.0, 448.0, 448.0, -448.0]


def test_a_block_that_is_not_finite_is_not_a_number_and_a_tiny_one_is_zero():
    x = torch.zeros(4, 32)
    x[0, 3], x[1, 5], x[2, 0], x[3, 0] = float("inf"), float("nan"), 2.0**-119, 2.0**-118
    rounded = mx_rounded(x, 1, E4M3)
    assert rounded[:2].isnan().all()
    assert rounded[2:, 0].tolist() == [0.0, 2.0**-118]


def test_blocks_begin_anew_with_every_group_of_rows():
    torch.manual_seed(1)
    x = torch.randn(43, 4).bfloat16()
    expected = torch.cat([by_torch(x[:40], 0, E4M3), by_torch(x[40:], 0, E4M3)])
    ends = torch.tensor(COUNTS).cumsum(0)
    assert torch.equal(mx_rounded_groups(x, ends, E4M3).double(), expected)


def operands(dtype=torch.bfloat16):
    torch.manual_seed(2)
    x, weight, dy = torch.randn(43, 70), torch.randn(3, 70, 36), torch.randn(43, 36)
    return [one.to(dtype).requires_grad_(one is not dy) for one in (x, weight, dy)]


def expected_of(x, weight, dy, quant_format):
    """Product and gradients, every operand rounded along what is summed."""
    form, of_gradients = FORMATS[quant_format]
    x, weight, dy = x.detach(), weight.detach(), dy.detach()
    parts = list(zip(x.split(COUNTS), weight, dy.split(COUNTS)))
    y = torch.cat([by_torch(a, 1, form) @ by_torch(w, 0, form) for a, w, _ in parts])
    dx = torch.cat([by_torch(g, 1, of_gradients) @ by_torch(w, 1, form).t() for _, w, g in parts])
    dw = torch.stack(
        [by_torch(a, 0, form).t() @ by_torch(g, 0, of_gradients) if len(a) else 0.0 * w for a, w, g in parts]
    )
    return y, dx, dw


@pytest.mark.parametrize("quant_format", FORMATS)
@pytest.mark.parametrize("tokens", [COUNTS, torch.tensor(COUNTS)], ids=["list", "tensor"])
def test_every_product_rounds_its_operands_along_what_it_sums(quant_format, tokens):
    x, weight, dy = operands()
    y = npu_quant_group_gemm(x, weight, None, tokens, None, quant_format, False)
    y.backward(dy)
    for got, wanted in zip((y, x.grad, weight.grad), expected_of(x, weight, dy, quant_format)):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)


def test_the_weight_s_gradient_is_added_to_one_that_is_there_and_never_lost():
    x, weight, dy = operands(torch.float32)
    _, _, dw = expected_of(x, weight, dy, "E4M3")
    for times in (1, 2):
        npu_quant_group_gemm(x, weight, None, COUNTS, weight, "E4M3", True).backward(dy)
        torch.testing.assert_close(weight.grad.double(), times * dw, rtol=1e-4, atol=1e-4)


def test_a_bias_is_added_to_the_rows_of_its_group():
    x, weight, _ = operands()
    bias = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 36).bfloat16()
    without = npu_quant_group_gemm(x, weight, None, COUNTS, None, "E4M3", False)
    with_bias = npu_quant_group_gemm(x, weight, bias, COUNTS, None, "E4M3", False)
    assert torch.equal(with_bias, without + torch.tensor([1.0] * 40 + [3.0] * 3).bfloat16().unsqueeze(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_format": "HIF8"}, "quant_format must be one of E4M3, HYBRID"),
        ({"bias": torch.ones(3, 36, requires_grad=True)}, "bias has no gradient"),
        ({"gemm_gradient_accumulation_fusion": True}, "pass weight_param"),
        ({"tokens_per_expert": [40, 0, 4]}, "must cover all 43 rows"),
    ],
)
def test_what_is_not_computed_is_refused(changes, message):
    x, weight, _ = operands()
    given = {"bias": None, "tokens_per_expert": COUNTS, "weight_param": None, "quant_format": "E4M3"}
    given |= {"gemm_gradient_accumulation_fusion": False, **changes}
    with pytest.raises(ContractError, match=message):
        npu_quant_group_gemm(x, weight, **given)


FOUR_BITS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
"""What 4 bits can say, without a sign; every other one has an even mantissa."""


def by_list(x):
    """Blocks of 32 numbers of a row, each number the nearest of the list at the block's power of two."""
    blocks = []
    for block in x.double().split(32, -1):
        largest = block.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest)) - 2), 1.0)
        distance = ((block / scale).abs().unsqueeze(-1) - FOUR_BITS).abs()
        near = distance == distance.amin(-1, keepdim=True)
        # Of two that are as near, the even one.
        even = torch.arange(8) % 2 == 0
        chosen = torch.where((near & even).any(-1), (near & even).int().argmax(-1), near.int().argmax(-1))
        blocks.append(FOUR_BITS[chosen] * block.sign() * scale)
    return torch.cat(blocks, -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_four_bits_are_the_nearest_of_their_list(dtype):
    torch.manual_seed(3)
    x = (torch.randn(4, 70) * torch.exp2(torch.randint(-12, 12, (4, 70)))).to(dtype)
    x[0, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -7.9])
    x[0, 8:32], x[1, :32] = 0, 0
    assert torch.equal(mx_rounded(x, -1, E2M1).double(), by_list(x))
    assert mx_rounded(x, -1, E2M1)[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, -6]


@pytest.mark.parametrize("ends", [[40, 40, 43], torch.tensor([40, 40, 43])], ids=["list", "tensor"])
def test_weights_of_four_bits_are_multiplied_with_rows_of_eight(ends):
    x, weight, dy = operands()
    y = gmm_w4a8.npu_gmm(x, weight, group_list=ends)
    y.backward(dy)
    few_bits = by_list(weight.detach()).bfloat16()
    assert torch.equal(few_bits.double(), by_list(weight.detach()))
    for got, wanted in zip((y, x.grad, weight.grad), expected_of(x, few_bits, dy, "E4M3")):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), wanted, rtol=1e-2, atol=1e-2)
    below = gmm_w4a8.W4A8GMMFunction.apply(None, x, weight, None, (torch.tensor([40, 40, 43]), 0, 0, 0, 32))
    assert torch.equal(below, y)


def test_few_bits_are_exact_in_eight_whichever_dimension_shares_the_exponents():
    _, weight, _ = operands(torch.float32)
    few_bits = mx_rounded(weight.detach(), -1, E2M1)
    for axis in (-1, -2):
        assert torch.equal(mx_rounded(few_bits, axis, E4M3), few_bits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 128}, "block_size must be 32, as MX formats have it, got 128"),
        ({"group_type": 2}, "group_type must be 0"),
        ({"group_list": None}, "must say where each group"),
        ({"group_list": [40, 40, 44]}, "must cover all 43 rows"),
        ({"bias": torch.ones(3, 36, requires_grad=True)}, "bias has no gradient"),
    ],
)
def test_what_is_not_computed_with_four_bits_is_refused(changes, message):
    x, weight, _ = operands()
    with pytest.raises(ContractError, match=message):
        gmm_w4a8.npu_gmm(x, weight, **{"group_list": [40, 40, 43], **changes})
    with pytest.raises(ContractError, match="group_list_type must be 0, ends of groups, got 1"):
        gmm_w4a8.W4A8GMMFunction.apply(None, x, weight, None, (torch.tensor(COUNTS), 0, 1, 0, 32))


def test_a_bias_is_added_to_products_of_four_bits():
    x, weight, _ = operands()
    bias = torch.tensor([[1.0], [2.0], [3.0]]).expand(3, 36).bfloat16()
    without = gmm_w4a8.npu_gmm(x, weight, group_list=[40, 40, 43])
    with_bias = gmm_w4a8.npu_gmm(x, weight, bias=bias, group_list=[40, 40, 43])
    assert torch.equal(with_bias, without + torch.tensor([1.0] * 40 + [3.0] * 3).bfloat16().unsqueeze(1))
