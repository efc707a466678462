"""Grouped products and accumulation in place: values, gradients, empty groups, memory, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed_kernels.ops import ContractError
from mindspeed_kernels.ops import gmm as gmm_operators
from mindspeed_kernels.ops.gmm import grouped_matmul, npu_gmm, npu_gmm_v2
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed_kernels.ops.quant_gmm import npu_quant_gmm, npu_quant_gmm_v2
from mindspeed_kernels.ops.quantization import decoded_scale, packed_scale
from mindspeed_kernels.ops.weight_quant_gmm import npu_weight_quant_gmm, npu_weight_quant_gmm_v2

FAST = settings(max_examples=25, deadline=None)
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def ends_of(counts):
    return torch.tensor(counts).cumsum(0)


def by_hand(x, weight, counts):
    return torch.cat([rows @ matrix for rows, matrix in zip(x.split(counts), weight)])


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {item.untyped_storage().data_ptr() for item in args if isinstance(item, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.elements = max(self.elements, result.untyped_storage().nbytes() // result.element_size())
        return result


@FAST
@given(
    counts=COUNTS, k=st.sampled_from([1, 7, 8, 16]), n=st.sampled_from([1, 5, 16]), seed=st.integers(0, 99)
)
def test_grouped_products_equal_one_product_per_group(counts, k, n, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(sum(counts), k), torch.randn(len(counts), k, n)
    gradient = torch.randn(sum(counts), n)
    found = []
    for function in (
        lambda x, w: npu_gmm(x, w, group_list=ends_of(counts).tolist()),
        lambda x, w: npu_gmm_v2(x, w, group_list=torch.tensor(counts)),
        lambda x, w: by_hand(x, w, counts),
    ):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        result = function(*leaves)
        result.backward(gradient)
        found.append((result.detach(), leaves[0].grad, leaves[1].grad))
    for other in found[:2]:
        torch.testing.assert_close(other, found[2], rtol=1e-5, atol=1e-5)


def test_a_gradient_that_is_expanded_from_one_number_is_taken():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 16, requires_grad=True)
    npu_gmm(x, weight, group_list=[2, 6]).sum().backward()
    torch.testing.assert_close(x.grad[:2], weight[0].sum(1).expand(2, -1))


def test_a_transposed_weight_is_taken():
    x, weight = torch.randn(6, 8), torch.randn(2, 16, 8)
    result = npu_gmm(x, weight.transpose(1, 2), group_list=[2, 6])
    torch.testing.assert_close(result, by_hand(x, weight.transpose(1, 2), [2, 4]))


def test_backward_adds_to_the_main_gradient_and_keeps_none_of_its_own():
    weight = torch.nn.Parameter(torch.randn(3, 64, 64))
    weight.main_grad = torch.ones(3, 64, 64)
    x = torch.randn(9, 64, requires_grad=True)
    result = npu_gmm(x, weight, group_list=[2, 2, 9], gemm_fusion=True, original_weight=weight)
    gradient = torch.randn(9, 64)
    with LargestTensor() as largest:
        result.backward(gradient)
    expected = torch.stack(
        [a.t() @ b for a, b in zip(x.detach().split([2, 0, 7]), gradient.split([2, 0, 7]))]
    )
    torch.testing.assert_close(weight.main_grad, 1 + expected)
    assert weight.grad_added_to_main_grad
    assert largest.elements < weight.numel()


def test_hooks_of_a_parameter_see_a_gradient_that_takes_no_memory():
    weight = torch.nn.Parameter(torch.randn(2, 8, 8))
    weight.main_grad = torch.zeros(2, 8, 8)
    seen = []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(weight.grad.untyped_storage().nbytes()))
    result = npu_gmm(torch.randn(4, 8), weight, group_list=[1, 4], gemm_fusion=True, original_weight=weight)
    result.sum().backward()
    assert seen == [4]


def test_groups_of_the_summed_dimension_give_one_product_each():
    x, y = torch.randn(5, 9), torch.randn(9, 4)
    result = npu_gmm(x, y, group_list=[2, 2, 9], group_type=2)
    expected = [a @ b for a, b in zip(x.split([2, 0, 7], 1), y.split([2, 0, 7]))]
    torch.testing.assert_close(result, torch.stack(expected))


def test_a_bias_is_added_to_the_rows_of_its_group():
    x, weight, bias = torch.randn(6, 8), torch.randn(2, 8, 16), torch.randn(2, 16)
    result = npu_gmm(x, weight, bias=bias, group_list=[2, 6])
    torch.testing.assert_close(
        result, by_hand(x, weight, [2, 4]) + bias.repeat_interleave(torch.tensor([2, 4]), 0)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_list": [3, 2]}, "must not decrease"),
        ({"group_list": [2, 5]}, "must cover all 6 rows, covers 5"),
        ({"group_list": [6]}, "one entry for each of the 2 weights, got 1"),
        ({"group_list": torch.tensor([2.0, 6.0])}, "must be one-dimensional int64"),
        ({"group_list": [2, 6], "group_type": 1}, "group_type must be 0 or 2, got 1"),
        (
            {"group_list": [2, 6], "bias": torch.zeros(2, 16, requires_grad=True)},
            "bias has no gradient",
        ),
        ({"group_list": [2, 6], "gemm_fusion": True}, "original_weight.main_grad, which is missing"),
    ],
)
def test_what_grouped_products_refuse(options, message):
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 16)
    with pytest.raises(ContractError, match=message):
        npu_gmm(x, weight, **options)


def test_counts_come_as_a_tensor():
    with pytest.raises(ContractError, match="npu_gmm_v2: group_list must be a tensor of counts"):
        npu_gmm_v2(torch.randn(6, 8), torch.randn(2, 8, 16), group_list=[2, 4])


def test_operands_of_different_dtypes_are_refused_by_name():
    with pytest.raises(ContractError, match=r"grouped_matmul\[any\]: weight dtype must be that of x"):
        grouped_matmul(torch.randn(6, 8), torch.randn(2, 8, 16, dtype=torch.bfloat16), torch.tensor([2, 6]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_accumulation_over_micro_batches_is_not_rounded_in_between(dtype):
    torch.manual_seed(0)
    pairs = [(torch.randn(700, 24).to(dtype), torch.randn(700, 16).to(dtype)) for _ in range(4)]
    grad = torch.zeros(16, 24)
    for x, dy in pairs:
        npu_matmul_add_fp32(x, dy, grad)
    truth = sum(dy.double().t() @ x.double() for x, dy in pairs)
    assert float((grad.double() - truth).abs().max() / truth.abs().max()) <= 1e-6


def test_accumulation_makes_no_tensor_of_the_size_of_the_weight():
    x, dy = torch.randn(64, 256).bfloat16(), torch.randn(64, 512).bfloat16()
    grad = torch.zeros(512, 256)
    with LargestTensor() as largest:
        npu_matmul_add_fp32(x, dy, grad)
    assert largest.elements < grad.numel()


@FAST
@given(counts=COUNTS, flat=st.booleans(), seed=st.integers(0, 99))
def test_grouped_accumulation_equals_one_product_per_group(counts, flat, seed):
    torch.manual_seed(seed)
    rows, groups = sum(counts), len(counts)
    x, dy = torch.randn(rows, 6).bfloat16(), torch.randn(rows, 4).bfloat16()
    grad = torch.randn(groups, 6, 4)
    expected = grad + torch.stack(
        [a.float().t() @ b.float() for a, b in zip(x.split(counts), dy.split(counts))]
    )
    npu_groupmatmul_add_fp32(x, dy, ends_of(counts), grad.view(-1, 4) if flat else grad)
    torch.testing.assert_close(grad, expected)


def test_accumulation_refuses_a_gradient_of_another_shape():
    with pytest.raises(ContractError, match=r"npu_matmul_add_fp32\[.*\]: grad size of dimension 0"):
        npu_matmul_add_fp32(torch.randn(4, 8), torch.randn(4, 6), torch.zeros(5, 8))


@pytest.mark.parametrize("name", ["groupmatmul_add_fp32_", "grouped_matmul_rows", "grouped_matmul_weights"])
def test_custom_operators_keep_the_rules_of_torch(name):
    ends = torch.tensor([2, 2, 9])
    x, dy = torch.randn(9, 8), torch.randn(9, 16)
    arguments = {
        "groupmatmul_add_fp32_": (x, dy, ends, torch.zeros(3, 8, 16)),
        "grouped_matmul_rows": (x, torch.randn(3, 8, 16), ends),
        "grouped_matmul_weights": (x, dy, ends),
    }[name]
    torch.library.opcheck(getattr(torch.ops.mskernels, name).default, arguments)


def int8(*shape):
    return torch.randint(-128, 128, shape, dtype=torch.int8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_quantized_products_are_exact_before_they_are_scaled(transposed, counts):
    torch.manual_seed(0)
    x, scale, per_token = int8(32, 256), torch.rand(8, 128), torch.rand(32)
    weight = int8(8, 128, 256).transpose(-1, -2) if transposed else int8(8, 256, 128)
    ends = torch.tensor([1, 3, 6, 10, 15, 21, 28, 32])
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    options = {"per_token_scale": per_token * 1e-4, "output_dtype": torch.float16}
    if counts:
        result = npu_quant_gmm_v2(x, weight, scale, group_list=sizes, **options)
    else:
        result = npu_quant_gmm(x, weight, scale, group_list=ends, **options)
    exact = by_hand(x.long(), weight.long(), sizes.tolist()).double()
    expected = exact * scale.repeat_interleave(sizes, 0).double() * per_token.unsqueeze(1).double() * 1e-4
    assert result.dtype == torch.float16
    torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=1e-3)


def test_a_packed_scale_gives_int8():
    scale = torch.tensor([[0.01, 0.5]])
    torch.testing.assert_close(decoded_scale(packed_scale(scale)), scale)
    x, weight = int8(3, 4), int8(1, 4, 2)
    result = npu_quant_gmm(x, weight, packed_scale(scale), group_list=[3])
    expected = ((x.double() @ weight[0].double()) * scale.double()).round().clamp(-128, 127)
    assert result.dtype == torch.int8
    torch.testing.assert_close(result.double(), expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"offset": torch.zeros(2, 8)}, "offset is not computed"),
        ({"act_type": 3}, "act_type must be one of 0, 1, 2, 4, 5, got 3"),
        ({"output_dtype": torch.bfloat16}, "needs a scale of torch.bfloat16, got torch.float32"),
    ],
)
def test_what_quantized_products_refuse(options, message):
    with pytest.raises(ContractError, match=message):
        npu_quant_gmm(int8(6, 8), int8(2, 8, 8), torch.ones(2, 8), group_list=[2, 6], **options)


def test_an_eight_bit_weight_is_shifted_and_scaled_before_it_is_multiplied():
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8), int8(2, 8, 16)
    scale, offset = torch.rand(2, 16), torch.randn(2, 16)
    wide = (weight + offset.unsqueeze(1)) * scale.unsqueeze(1)
    expected = torch.relu(by_hand(x, wide, [2, 4]))
    first = npu_weight_quant_gmm(x, weight, scale, antiquant_offset=offset, group_list=[2, 6], act_type=1)
    second = npu_weight_quant_gmm_v2(
        x, weight, scale, antiquant_offset=offset, group_list=torch.tensor([2, 4]), act_type=1
    )
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(second, first)


def test_the_offset_of_an_eight_bit_weight_is_needed():
    with pytest.raises(ContractError, match="antiquant_offset is needed"):
        npu_weight_quant_gmm(torch.randn(6, 8), int8(2, 8, 16), torch.rand(2, 16), group_list=[2, 6])


def test_the_module_is_imported_as_one_name_too():
    assert gmm_operators.npu_gmm is npu_gmm
