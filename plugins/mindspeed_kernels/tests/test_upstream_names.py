"""Names below the public operators by which existing scripts call grouped products and single kernels."""

import pytest
import torch

from mindspeed_kernels import op_builder
from mindspeed_kernels.ops.gmm import npu_gmm, npu_gmm_param_verification
from mindspeed_kernels.ops.gmm_function import GMMFunction
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp16
from mindspeed_kernels.ops.rms_norm import rms_norm
from mindspeed_kernels.ops.swiglu import swiglu


def test_separate_gradients_and_the_accumulating_product_agree():
    torch.manual_seed(0)
    x, outer, weight = torch.rand(10, 4), torch.rand(10, 2), torch.rand(2, 4, 2)
    ends, total = torch.tensor([5, 10]), torch.rand(8, 2)
    rows, weights, bias = GMMFunction.builder.load().npu_gmm_backward([outer], [x], [weight], ends, 0)
    expected = total + weights[0].view(*total.shape)
    npu_groupmatmul_add_fp32(x, outer, ends, total)
    torch.testing.assert_close(total, expected)
    assert bias == []
    by_hand = torch.cat([outer[:5] @ weight[0].t(), outer[5:] @ weight[1].t()])
    torch.testing.assert_close(rows[0], by_hand)
    fused = GMMFunction.builder2.load().npu_gmm_backward_fusion([outer], [weight], torch.tensor([5, 5]), 1)
    torch.testing.assert_close(fused[0][0], by_hand)


@pytest.mark.parametrize(("group_list", "kind"), [([3, 10], 0), (torch.tensor([3, 7]), 1)])
def test_a_grouped_product_with_a_bias_has_gradients(group_list, kind):
    torch.manual_seed(1)
    x, weight = torch.rand(10, 4, requires_grad=True), torch.rand(2, 4, 2, requires_grad=True)
    bias = torch.rand(2, 2)
    found = []
    for function in (
        lambda: GMMFunction.apply(None, x, weight, bias, (group_list, 0, False, kind, kind)),
        lambda: npu_gmm(x, weight, bias=bias, group_list=[3, 10]),
        lambda: torch.cat([x[:3] @ weight[0] + bias[0], x[3:] @ weight[1] + bias[1]]),
    ):
        x.grad = weight.grad = None
        result = function()
        result.square().sum().backward()
        found.append((result.detach(), x.grad, weight.grad))
    for other in found[:2]:
        torch.testing.assert_close(other, found[2])
    with pytest.raises(ValueError, match="bias has no gradient"):
        GMMFunction.apply(None, x, weight, bias.requires_grad_(), (group_list, 0, False, kind, kind))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1]}, TypeError, "x must be a torch.Tensor"),
        ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor"),
        ({"group_list": (1.5,)}, TypeError, "a list of int"),
        ({"group_list": [1, 2], "group_list_type": 1}, TypeError, "a torch.Tensor of counts"),
        ({"group_list": torch.ones(1, 2, dtype=torch.int64)}, ValueError, "one-dimensional"),
        ({"group_list": torch.ones(2)}, TypeError, "must be int64"),
        ({"group_type": "0"}, TypeError, "group_type must be an int"),
        ({"weight": torch.ones(1, device="meta")}, RuntimeError, "x on cpu, weight on meta"),
    ],
)
def test_arguments_of_grouped_products_are_verified(change, error, message):
    given = {"x": torch.ones(2, 2), "weight": torch.ones(1, 2, 2), "group_list": [2], **change}
    with pytest.raises(error, match=message):
        npu_gmm_param_verification(given.pop("x"), given.pop("weight"), **given)


def test_loaders_bring_the_operators_of_their_names():
    x, gamma = torch.rand(2, 4), torch.rand(4)
    torch.testing.assert_close(op_builder.RmsNormOpBuilder().load().rms_norm(x, gamma), rms_norm(x, gamma))
    torch.testing.assert_close(op_builder.SwigluOpBuilder().load().swiglu(x, dim=-1), swiglu(x))
    dy, total = torch.rand(2, 3), torch.ones(3, 4)
    op_builder.MatmulAddOpBuilder().load().npu_matmul_add_fp32(dy, x, total)
    torch.testing.assert_close(total, 1 + dy.t() @ x)
    for name in ("GroupMatmulAdd", "MoeTokenPermute", "MoeTokenUnpermute", "RingAttentionUpdate"):
        loaded = getattr(op_builder, f"{name}OpBuilder")().load()
        assert all(callable(function) for function in vars(loaded).values())


def test_a_gradient_of_half_precision_is_added_in_its_own_dtype():
    x, dy, total = torch.rand(4, 3).half(), torch.rand(4, 2).half(), torch.ones(2, 3).half()
    expected = total + dy.t() @ x
    npu_matmul_add_fp16(x, dy, total)
    assert torch.equal(total, expected)
    npu_matmul_add_fp16(x[:0], dy[:0], total)
    assert torch.equal(total, expected)
