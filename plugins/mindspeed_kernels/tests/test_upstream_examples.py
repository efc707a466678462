"""The calls of MindSpeed's operator manuals: the same forms of arguments, on tensors of the host.

Sizes are smaller. Lists of counts in three of its manuals add up to 33 of 32 rows; those are refused here.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from mindspeed_kernels import ops
from mindspeed_kernels.absent import ABSENT
from mindspeed_kernels.op_builder import RmsNormOpBuilder, SwigluOpBuilder
from mindspeed_kernels.ops import ContractError, ffn, gmm, lcal_functional, quant_gmm, weight_quant_gmm
from mindspeed_kernels.ops.dropout_add_layer_norm import npu_dropout_add_layer_norm
from mindspeed_kernels.ops.fused_grouped_matmul import eager_grouped_matmul, fused_grouped_matmul
from mindspeed_kernels.ops.fusion_attention_v2 import npu_fusion_attention
from mindspeed_kernels.ops.gmm_function import GMMFunction
from mindspeed_kernels.ops.lcal_functional import coc_ops
from mindspeed_kernels.ops.npu_all_to_all_all_gather_bmm import npu_alltoall_allgather_bmm
from mindspeed_kernels.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reducescatter_alltoall
from mindspeed_kernels.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
from mindspeed_kernels.ops.npu_groupmatmul_add import npu_groupmatmul_add_fp32
from mindspeed_kernels.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm_ import npu_mm_all_reduce_add_rms_norm_
from mindspeed_kernels.ops.npu_moe_token_permute import npu_moe_token_permute
from mindspeed_kernels.ops.npu_moe_token_unpermute import npu_moe_token_unpermute
from mindspeed_kernels.ops.npu_ring_attention_update import npu_ring_attention_update
from mindspeed_kernels.ops.npu_rotary_position_embedding import npu_rotary_position_embedding
from mindspeed_testing import run_world

ENDS, COUNTS = [1, 3, 6, 10, 15, 21, 28, 32], [1, 3, 3, 4, 5, 6, 7, 3]
GROUPS = [slice(start, end) for start, end in zip([0, *ENDS], [*ENDS, 32])][:8]


def close(got, expected, tolerance=1e-5):
    torch.testing.assert_close(got.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_grouped_product(transposed, counted):
    x = (torch.rand(32, 16).half() - 0.5).requires_grad_()
    shape = (8, 32, 16) if transposed else (8, 16, 32)
    weight = (torch.rand(shape).half() - 0.5).requires_grad_()
    used = weight.transpose(-1, -2) if transposed else weight
    if counted:
        counts = torch.tensor([1, 3, 3, 4, 5, 6, 7, 3])
        result = gmm.npu_gmm_v2(x, used, bias=None, group_list=counts, group_type=0)
    else:
        result = gmm.npu_gmm(x, used, bias=None, group_list=ENDS, group_type=0)
    result.backward(torch.ones(result.shape))
    rows = [slice(a, b) for a, b in zip([0, 1, 4, 7, 11, 16, 22, 29], [1, 4, 7, 11, 16, 22, 29, 32])]
    parts = rows if counted else GROUPS
    expected = torch.cat([x[part].float() @ used[e].float() for e, part in enumerate(parts)])
    close(result, expected, 1e-2)
    assert x.grad.shape == x.shape
    assert weight.grad.shape == weight.shape


def test_counts_that_do_not_add_up_are_refused_in_one_sentence():
    x, weight, counts = torch.rand(32, 16), torch.rand(8, 16, 32), torch.tensor([1, 3, 3, 4, 5, 6, 7, 4])
    with pytest.raises(ContractError, match=r"must cover all 32 rows, covers 33"):
        gmm.npu_gmm_v2(x, weight, bias=None, group_list=counts, group_type=0)
    with pytest.raises(ContractError, match=r"must cover all 32 rows, covers 33"):
        weight_quant_gmm.npu_weight_quant_gmm_v2(
            x.half(),
            torch.randint(-128, 128, (8, 16, 32), dtype=torch.int8),
            torch.rand(8, 32).half(),
            antiquant_offset=torch.rand(8, 32).half(),
            bias=None,
            group_list=counts,
        )
    rows, weight = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((32, 16), (8, 16, 24)))
    with pytest.raises(ContractError, match=r"npu_quant_gmm_v2: .* must cover all 32 rows, covers 33"):
        quant_gmm.npu_quant_gmm_v2(
            rows,
            weight,
            torch.rand(8, 24),
            per_token_scale=torch.rand(32),
            bias=None,
            group_list=counts,
            output_dtype=torch.float16,
        )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_quantized_grouped_products(transposed, counted):
    shape = (8, 16, 24) if not transposed else (8, 24, 16)
    weight = torch.randint(-128, 128, shape, dtype=torch.int8)
    used = weight.transpose(-1, -2) if transposed else weight
    groups = torch.tensor(COUNTS if counted else ENDS, dtype=torch.int64)
    x, scale = torch.randint(-128, 128, (32, 16), dtype=torch.int8), torch.rand(8, 24) * 1e-3
    function = quant_gmm.npu_quant_gmm_v2 if counted else quant_gmm.npu_quant_gmm
    result = function(
        x,
        used,
        scale,
        per_token_scale=torch.rand(32),
        bias=None,
        group_list=groups,
        output_dtype=torch.float16,
    )
    assert (result.shape, result.dtype) == ((32, 24), torch.float16)
    function = weight_quant_gmm.npu_weight_quant_gmm_v2 if counted else weight_quant_gmm.npu_weight_quant_gmm
    antiquant = [torch.rand(8, 24).half() for _ in range(2)]
    rows = torch.rand(32, 16).half()
    result = function(rows, used, antiquant[0], antiquant_offset=antiquant[1], bias=None, group_list=groups)
    first = (used[0].float() + antiquant[1][0].float()) * antiquant[0][0].float()
    close(result[:1], rows[:1].float() @ first, 2e-2)


def test_tokens_are_permuted_by_expert():
    tokens = (
        torch.tensor([[1, 1, 1], [2, 2, 2], [3, 3, 3], [0, 0, 0]]).to(torch.bfloat16).requires_grad_(True)
    )
    indices = torch.tensor([[0, 4], [4, 3], [4, 2], [1, 1]])
    permuted_tokens, sorted_indices = npu_moe_token_permute(tokens, indices, indices.numel())
    permuted_tokens.backward(torch.ones(permuted_tokens.shape).to(torch.bfloat16))
    assert permuted_tokens[:, 0].tolist() == [1, 0, 0, 3, 2, 1, 2, 3]
    assert sorted_indices.tolist() == [0, 5, 6, 4, 7, 3, 1, 2]
    assert tokens.grad.eq(2).all()


def test_permuted_tokens_come_back_with_their_probabilities():
    values = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 1.0, 2.0, 3.0])
    permuted_tokens = values.unsqueeze(1).repeat(1, 3).to(torch.bfloat16).requires_grad_(True)
    sorted_indices = torch.tensor([0, 6, 7, 5, 3, 1, 2, 4], dtype=torch.int32)
    probs = (torch.ones(4, 2, dtype=torch.int64) / 2).to(torch.bfloat16).requires_grad_(True)
    unpermuted_tokens = npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=probs)
    unpermuted_tokens.backward(torch.ones(unpermuted_tokens.shape).to(torch.bfloat16))
    assert unpermuted_tokens[:, 0].tolist() == [1.5, 2.0, 1.5, 1.0]
    assert permuted_tokens.grad.eq(0.5).all()
    assert torch.equal(probs.grad.flatten(), 3 * values[sorted_indices.long()].to(torch.bfloat16))


@pytest.mark.parametrize("tokens", ["none", "expert_tokens", "expert_tokens_index"])
def test_feed_forward(tokens):
    experts = () if tokens == "none" else (8,)
    x = torch.empty(64, 16, dtype=torch.float16).uniform_(-1.0, 1.0)
    weights = [torch.empty(*experts, *s, dtype=x.dtype).uniform_(-0.1, 0.1) for s in ((16, 32), (32, 16))]
    biases = [torch.empty(*experts, n, dtype=x.dtype).uniform_(-0.1, 0.1) for n in (32, 16)]
    given = {"expert_tokens": None, "expert_tokens_index": None}
    if tokens != "none":
        numbers = [8] * 8 if tokens == "expert_tokens" else list(range(8, 65, 8))
        given[tokens] = torch.tensor(numbers, dtype=torch.int64)
    y = ffn.npu_ffn(x, *weights, "relu", **given, bias1=biases[0], bias2=biases[1])
    first = [item[0] if experts else item for item in (*weights, *biases)]
    hidden = (x[:8].float() @ first[0].float() + first[2].float()).relu()
    close(y[:8], hidden @ first[1].float() + first[3].float(), 1e-2)


def test_attention():
    batch, heads, length, width = 1, 4, 64, 16
    shape, pre, following = (batch, heads, length, width), 65536, 1
    dx = torch.rand(shape).half() - 0.5
    query, key, value = (((torch.rand(shape).half() - 0.5) * 5).requires_grad_() for _ in range(3))
    mask = np.tri(length, k=-following) + np.tri(length, k=-pre).transpose()
    mask = torch.from_numpy(mask).to(torch.bool)
    result = npu_fusion_attention(
        query,
        key,
        value,
        heads,
        "BNSD",
        atten_mask=mask,
        scale=0.088,
        keep_prob=1.0,
        pre_tokens=pre,
        next_tokens=following,
        pse_type=1,
    )
    result[0].backward(dx)
    scores = (query.float() @ key.float().mT) * 0.088
    place = torch.arange(length)
    hidden = mask | (place[None, :] - place[:, None] > following)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    close(result[0], weights @ value.float(), 5e-3)
    assert all(tensor.grad is not None for tensor in (query, key, value))


def test_dropout_add_layer_norm():
    x0, residual = torch.randn(6, 5, 32, requires_grad=True), torch.randn(6, 5, 32, requires_grad=True)
    weight, bias, layer = (torch.randn((32,), requires_grad=True) for _ in range(3))
    rows = torch.randn((6, 5), requires_grad=True)
    switches = False, True, False
    norm = npu_dropout_add_layer_norm(x0, None, weight, None, 0.0, 1e-5, None, None, *switches)
    norm.backward(torch.randn_like(norm))
    close(norm, torch.nn.functional.layer_norm(x0, (32,), weight, None, 1e-5))
    switches = True, True, True
    norm, before, mask = npu_dropout_add_layer_norm(
        x0, residual, weight, bias, 0.0, 1e-5, rows, layer, *switches
    )
    norm.backward(torch.randn_like(norm))
    close(before, x0 * rows.unsqueeze(-1) * layer + residual)
    assert mask.all()
    assert all(item.grad is not None for item in (x0, residual, weight, bias, rows, layer))


def test_norm_and_activation_by_their_loaders():
    x, gamma = torch.rand([2, 4]).requires_grad_(), torch.rand([4])
    out = RmsNormOpBuilder().load().rms_norm(x, gamma)
    out.backward(torch.ones(out.shape))
    close(out, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma)
    x = torch.from_numpy(np.random.uniform(-2, 2, (8, 1, 12))).float().requires_grad_()
    result = SwigluOpBuilder().load().swiglu(x, dim=-1)
    result.backward(torch.ones(8, 1, 6))
    close(result, torch.nn.functional.silu(x[..., :6]) * x[..., 6:])


def test_weight_gradients_are_added():
    x, dy, ends = torch.rand(64, 12).half(), torch.rand(64, 10).half(), torch.tensor([30, 64])
    out, weight = torch.rand(24, 10), torch.rand(2, 12, 10).half()
    _, found, _ = GMMFunction.builder.load().npu_gmm_backward([dy], [x], [weight], ends, 0)
    single = out + found[0].view(*out.shape)
    npu_groupmatmul_add_fp32(x, dy, ends, out)
    close(out, single, 2e-2)
    x, weight, total = torch.rand(16, 8).half(), torch.rand(16, 12).half(), torch.rand(8, 12)
    expected = torch.mm(x.T.float(), weight.float()) + total
    npu_matmul_add_fp32(weight, x, total)
    close(total, expected, 1e-2)


def test_ring_update_and_rotary_embedding():
    outputs = [torch.randn(16, 1, 12, dtype=torch.bfloat16) for _ in range(2)]
    statistics = [torch.rand(1, 12, 16, 1).expand(-1, -1, -1, 8).contiguous() + 0.5 for _ in range(4)]
    merged, largest, total = npu_ring_attention_update(
        outputs[0], statistics[0], statistics[1], outputs[1], statistics[2], statistics[3]
    )
    close(largest, torch.maximum(statistics[0], statistics[2]))
    parts = [s * (m - largest).exp() for m, s in (statistics[:2], statistics[2:])]
    close(total, parts[0] + parts[1])
    shares = [(part / total)[..., 0].permute(2, 0, 1) for part in parts]
    close(merged, outputs[0].float() * shares[0] + outputs[1].float() * shares[1], 2e-2)
    x = torch.from_numpy(np.random.uniform(-2, 2, (4, 16, 4, 8))).float().requires_grad_()
    cos, sin = (
        torch.from_numpy(np.random.uniform(-1, 1, (1, 16, 1, 8))).float().requires_grad_() for _ in range(2)
    )
    result = npu_rotary_position_embedding(x, cos, sin, 0)
    result.backward(torch.ones_like(result))
    close(result, x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin)
    assert all(item.grad is not None for item in (x, cos, sin))


@pytest.mark.parametrize("function", [fused_grouped_matmul, eager_grouped_matmul])
def test_weights_of_grouped_products_lie_either_way(function):
    inputs, weights = torch.rand(6, 4, requires_grad=True), torch.rand(2, 4, 3)
    expected = torch.cat([inputs[:2] @ weights[0], inputs[2:] @ weights[1]])
    close(function(inputs, [2, 4], weights), expected)
    turned = weights.transpose(1, 2).contiguous().requires_grad_()
    result = function(inputs, torch.tensor([2, 4]), turned)
    close(result, expected)
    result.sum().backward()
    assert turned.grad.shape == turned.shape
    with pytest.raises(ContractError, match=r"\[E, k, n\] or \[E, n, k\] with k 4"):
        function(inputs, [2, 4], torch.rand(2, 5, 3))


def calls_of_two_ranks():
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.manual_seed(0)
    x, weight, bias = torch.rand(8, 12), torch.rand(12, 6), torch.rand(1, 6)
    output, scattered, gathered = torch.zeros(8, 6), torch.zeros(4, 6), torch.zeros(8, 12)
    coc_ops.matmul_all_reduce(x, weight, output, bias)
    close(output, 2 * (x @ weight) + bias)
    coc_ops.all_gather_matmul(x[:4], weight, output, bias)
    close(output, torch.cat([x[:4]] * 2) @ weight + bias)
    coc_ops.all_gather_matmul_v2(x[:4], weight, output, gathered, bias)
    close(gathered, torch.cat([x[:4]] * 2))
    coc_ops.matmul_reduce_scatter(x, weight, scattered, bias)
    close(scattered, 2 * (x @ weight)[4 * rank : 4 * rank + 4] + bias)
    coc_ops.pure_matmul(x, weight, output, bias)
    close(output, x @ weight + bias)

    x1, residual, gamma = torch.randn(2, 4, 12), torch.randn(2, 4, 6), torch.randn(6)
    options = {"x1": x1, "x2": weight, "gamma": gamma, "hcom": group, "reduce_op": "sum", "epsilon": 1e-6}
    with torch.no_grad():
        y, norm = npu_mm_all_reduce_add_rms_norm(residual=residual, **options)
        close(y, 2 * (x1 @ weight) + residual)
        close(norm, y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * gamma)
        written, _ = npu_mm_all_reduce_add_rms_norm_(residual=residual, **options)
    assert written is residual

    pairs = [torch.randn(8, 6), torch.randn(4, 12)], [torch.randn(6, 8), torch.randn(12, 4)]
    summed = npu_grouped_mat_mul_all_reduce(
        *pairs, group, bias=[], group_list=None, split_item=0, reduce_op="sum", comm_turn=0
    )
    for total, a, b in zip(summed, *pairs):
        close(total, 2 * (a @ b))


def calls_of_expert_and_tensor_ranks():
    dist.init_process_group("gloo")
    rank, (ep, tp) = dist.get_rank(), (2, 2)
    for part in range(tp):
        made = dist.new_group([ep * part + index for index in range(ep)])
        if rank // ep == part:
            ep_group = made
    for part in range(ep):
        made = dist.new_group([index * ep + part for index in range(tp)])
        if rank % ep == part:
            tp_group = made
    experts, rows, width, inner = 4, 4, 8, 16
    x, weight = torch.rand(experts, rows // tp, width), torch.rand(experts // ep, width, inner // tp)
    y = npu_alltoall_allgather_bmm(
        x,
        weight,
        ep_group,
        ep,
        tp_group,
        tp,
        bias=None,
        shard_type=1,
        act_type="None",
        need_allgather_out=True,
        need_activation_feature=False,
    )
    assert y[0].shape == (experts // ep, ep * rows, inner // tp)
    close(y[0], y[1] @ weight)
    x, weight = torch.rand(experts // ep, tp * ep * rows, inner // tp), torch.rand(2, inner // tp, width)
    bias = torch.rand(experts // ep, 1, width)
    y = npu_bmm_reducescatter_alltoall(x, weight, ep_group, ep, tp_group, tp, bias=bias, shard_type=1)
    assert y.shape == (experts, rows, width)


def test_operators_between_ranks():
    run_world(calls_of_two_ranks, 2)
    run_world(calls_of_expert_and_tensor_ranks, 4)


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_an_operator_that_is_not_here_says_so_in_a_sentence(name):
    with pytest.raises(ImportError, match=f"^{name} of MindSpeed is not here: "):
        getattr(ops, name)
    code = f"from mindspeed_kernels.ops import {name}"
    with pytest.raises(ImportError, match="is not here"):
        exec(code, {})


def test_what_tensor_parallelism_brings_says_so_where_it_is_looked_for():
    for name in ("set_comm_config", "all_gather_matmul_reduce_scatter"):
        with pytest.raises(AttributeError, match="mindspeed-tp has it"):
            getattr(coc_ops, name)
    for name in ("CoCConfig", "TP2DConfig"):
        with pytest.raises(ImportError, match="mindspeed-tp has it"):
            getattr(lcal_functional, name)
    assert not hasattr(coc_ops, "something_else")
    assert not hasattr(ops, "something_else")
