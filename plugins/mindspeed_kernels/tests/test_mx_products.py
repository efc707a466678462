"""Grouped products in MX formats: rounding by torch's own float8, each gradient's rounding, refusals."""

import pytest
import torch

from mindspeed_kernels.ops import ContractError, npu_quant_group_gemm
from mindspeed_kernels.ops.mx_formats import E4M3, E5M2, mx_rounded, mx_rounded_groups

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
