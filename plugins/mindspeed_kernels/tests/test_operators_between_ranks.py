"""Operators with communication, on one, two and four ranks: values, gradients, order of work, refusals."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mindspeed_kernels.ops import ContractError
from mindspeed_kernels.ops.lcal_functional import coc_ops
from mindspeed_kernels.ops.npu_all_to_all_all_gather_bmm import npu_alltoall_allgather_bmm
from mindspeed_kernels.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reducescatter_alltoall
from mindspeed_kernels.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm_ import npu_mm_all_reduce_add_rms_norm_
from mindspeed_kernels.ops.overlapped_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
    product_of_gathered,
    product_scattered,
    product_summed,
)
from mindspeed_testing import run_world


def same(seed, *shape, dtype=torch.float64):
    """The same random tensor on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def check_overlapped(parts, group):
    rank, ranks = group.rank(), group.size()
    m, k, n = 8 * ranks, 6 * ranks, 5
    x, weight, bias, outer = same(0, m, k), same(1, k, n), same(2, 1, n), same(3, m, n)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = whole[0] @ whole[1] + whole[2]
    expected.backward(outer)
    columns = slice(rank * k // ranks, (rank + 1) * k // ranks)
    rows = slice(rank * m // ranks, (rank + 1) * m // ranks)

    mine = [x[:, columns].clone().requires_grad_(), weight[columns].clone().requires_grad_()]
    summed = matmul_all_reduce(*mine, bias, group, parts)
    close(summed, expected)
    summed.backward(outer)
    close(mine[0].grad, whole[0].grad[:, columns])
    close(mine[1].grad, whole[1].grad[columns])

    mine = [x[:, columns].clone().requires_grad_(), weight[columns].clone().requires_grad_()]
    scattered = matmul_reduce_scatter(*mine, bias, group, parts)
    close(scattered, expected[rows])
    scattered.backward(outer[rows])
    close(mine[0].grad, whole[0].grad[:, columns])
    close(mine[1].grad, whole[1].grad[columns])

    mine = [x[rows].clone().requires_grad_(), weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    product, gathered = all_gather_matmul(*mine, group, parts)
    close(product, expected)
    close(gathered, x)
    product.backward(outer)
    # Every rank holds a whole weight here, so backward sums its rows' gradients over all of them.
    close(mine[0].grad, whole[0].grad[rows] * ranks)
    close(mine[1].grad, whole[1].grad)
    close(mine[2].grad, whole[2].grad)


def check_written_into_tensors():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, weight, bias = same(0, 4 * ranks, 6 * ranks), same(1, 6 * ranks, 5), same(2, 1, 5)
    columns = slice(rank * 6, rank * 6 + 6)
    rows = slice(rank * 4, rank * 4 + 4)
    expected = x @ weight + bias
    output, part, whole = (torch.empty(*shape, dtype=x.dtype) for shape in ((4 * ranks, 5), (4, 5), x.shape))
    coc_ops.matmul_all_reduce(x[:, columns], weight[columns], output, bias)
    close(output, expected)
    coc_ops.matmul_reduce_scatter(x[:, columns], weight[columns], part, bias)
    close(part, expected[rows])
    coc_ops.all_gather_matmul(x[rows], weight, output.zero_(), bias)
    close(output, expected)
    coc_ops.all_gather_matmul_v2(x[rows], weight.t().contiguous().t(), output.zero_(), whole, bias)
    close(output, expected)
    close(whole, x)
    assert coc_ops.pure_matmul(x, weight, output.zero_(), bias) is output
    close(output, expected)


def check_norm_after_sum():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, weight, residual, gamma = same(0, 2, 3, 4 * ranks), same(1, 4 * ranks, 8), same(2, 2, 3, 8), same(3, 8)
    columns = slice(rank * 4, rank * 4 + 4)
    whole = [t.clone().requires_grad_() for t in (x, weight, residual, gamma)]
    total = whole[0] @ whole[1] + whole[2]
    norm = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * whole[3]
    outer = same(4, 2, 2, 3, 8)
    ((total * outer[0]).sum() + (norm * outer[1]).sum()).backward()
    mine = [x[..., columns], weight[columns], residual, gamma]
    mine = [t.clone().requires_grad_() for t in mine]
    for group in (dist.group.WORLD, dist.group.WORLD.group_name):
        y, n = npu_mm_all_reduce_add_rms_norm(*mine, group)
        close(y, total)
        close(n, norm)
    ((y * outer[0]).sum() + (n * outer[1]).sum()).backward()
    close(mine[0].grad, whole[0].grad[..., columns])
    close(mine[1].grad, whole[1].grad[columns])
    close(mine[2].grad, whole[2].grad)
    close(mine[3].grad, whole[3].grad)
    plain = [t.detach().clone() for t in mine]
    with torch.no_grad():
        y, n = npu_mm_all_reduce_add_rms_norm_(*plain, dist.group.WORLD, bias=torch.ones(8, dtype=x.dtype))
    assert y is plain[2]
    close(y, total.detach() + ranks)


def check_quantized_sum():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (1, 3, 64 * ranks), dtype=torch.int8, generator=generator)
    weight = torch.randint(-128, 128, (64 * ranks, 8), dtype=torch.int8, generator=generator)
    columns = slice(rank * 64, rank * 64 + 64)
    scale, residual, gamma = same(5, 8).abs().float(), same(2, 1, 3, 8).float(), same(3, 8).float()
    exact = (x.long() @ weight.long()).double() * scale.double() + residual
    y, _ = npu_mm_all_reduce_add_rms_norm(
        x[..., columns], weight[columns], residual, gamma, dist.group.WORLD, dequant_scale=scale
    )
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-2)
    rows, groups = same(6, 1, 3, 64 * ranks).float(), same(7, 2, 8).float().abs()
    wide = weight.float().view(ranks, 2, 32, 8) * groups.view(1, 2, 1, 8)
    y, _ = npu_mm_all_reduce_add_rms_norm(
        rows[..., columns],
        weight[columns],
        residual,
        gamma,
        dist.group.WORLD,
        antiquant_scale=groups,
        antiquant_group_size=32,
    )
    torch.testing.assert_close(y, rows @ wide.view(-1, 8) + residual, rtol=1e-4, atol=1e-2)


def check_several_products():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, weight = same(0, 6, 4 * ranks), [same(1, 4 * ranks, 5), same(2, 4 * ranks, 5)]
    columns = slice(rank * 4, rank * 4 + 4)
    mine = x[:, columns]
    weights = [w[columns] for w in weight]
    expected = [x[:2] @ weight[0], x[2:] @ weight[1]]
    bias = [same(3, 5), same(4, 5)]
    with torch.no_grad():
        separate = npu_grouped_mat_mul_all_reduce([mine[:2], mine[2:]], weights, dist.group.WORLD)
        biased = npu_grouped_mat_mul_all_reduce(
            [mine], weights, dist.group.WORLD, bias=bias, group_list=[2, 6], split_item=1
        )
        joined = npu_grouped_mat_mul_all_reduce(
            [mine], weights, dist.group.WORLD, bias=[], group_list=[2, 6], split_item=3
        )
    for index in range(2):
        close(separate[index], expected[index])
        close(biased[index], expected[index] + ranks * bias[index])
    assert len(joined) == 1
    close(joined[0], torch.cat(expected))


def check_refusals():
    x, weight, residual, gamma = same(0, 1, 3, 4), same(1, 4, 8), same(2, 1, 3, 8), same(3, 8)
    for options, message in (
        ({"hcom": "nobody"}, "hcom: no process group is called 'nobody'"),
        ({"hcom": dist.group.WORLD, "reduce_op": "max"}, "reduce_op must be one of sum, got 'max'"),
        ({"hcom": dist.group.WORLD, "comm_turn": 3}, "comm_turn must be one of 0, got 3"),
    ):
        with pytest.raises(ContractError, match=message):
            npu_mm_all_reduce_add_rms_norm(x, weight, residual, gamma, **options)
    with pytest.raises(ContractError, match="rows of x must be a multiple of the group's 2 ranks, got 5"):
        matmul_reduce_scatter(same(0, 5, 4), same(1, 4, 3))
    with pytest.raises(ContractError, match="parts must be one of 1, 2, 4, 8, got 3"):
        matmul_all_reduce(same(0, 6, 4), same(1, 4, 3), parts=3)
    with pytest.raises(ContractError, match="needs one x for each of the 2 weights"):
        npu_grouped_mat_mul_all_reduce([x[0]], [weight, weight], dist.group.WORLD)


def two_ranks():
    dist.init_process_group("gloo")
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for parts in (1, 2, 4, 8):
        check_overlapped(parts, dist.group.WORLD)
        check_overlapped(parts, alone)
    check_written_into_tensors()
    check_norm_after_sum()
    check_quantized_sum()
    check_several_products()
    check_refusals()
    dist.barrier()
    dist.destroy_process_group()


def four_ranks():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for parts in (1, 2, 4):
        check_overlapped(parts, dist.group.WORLD)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tp, ep = pairs[rank // 2], pairs[2 + rank % 2]
    for shard in (0, 1):
        check_experts(ep, tp, shard)
    with pytest.raises(ContractError, match="ep_world_size must be the size of group_ep, 2, got 4"):
        npu_alltoall_allgather_bmm(same(0, 4, 4, 3), same(1, 2, 6, 2), ep, 4, tp, 2)
    with pytest.raises(ContractError, match="must be different groups"):
        npu_alltoall_allgather_bmm(same(0, 4, 4, 3), same(1, 2, 6, 2), ep, 2, ep, 2)
    with pytest.raises(ContractError, match="act_type must be one of None, gelu"):
        npu_alltoall_allgather_bmm(same(0, 4, 4, 3), same(1, 2, 6, 2), ep, 2, tp, 2, act_type="tanh")
    dist.barrier()
    dist.destroy_process_group()


def check_experts(ep, tp, shard):
    """Two expert layers over 2 x 2 ranks equal the same on one, forward and backward."""
    experts, capacity, hidden, inner = 4, 4, 6, 8
    e, t = ep.rank(), tp.rank()
    x = same(0, 2, experts, capacity, hidden)
    first, bias = same(1, experts, hidden, inner), same(2, experts, inner)
    second, shift = same(3, experts, inner, hidden), same(4, experts, hidden)
    outer = same(5, 2, experts, capacity, hidden)
    whole = [v.clone().requires_grad_() for v in (x, first, bias, second, shift)]
    hidden_all = torch.relu(torch.einsum("sech,ehm->secm", whole[0], whole[1]) + whole[2][:, None])
    expected = torch.einsum("secm,emh->sech", hidden_all, whole[3]) + whole[4][:, None]
    expected.backward(outer)

    mine, wide = slice(2 * e, 2 * e + 2), slice(4 * t, 4 * t + 4)
    columns = slice(3 * t, 3 * t + 3) if shard == 0 else slice(None)
    rows = slice(None) if shard == 0 else slice(2 * t, 2 * t + 2)
    local = [x[e][:, rows, columns], first[mine, :, wide], bias[mine, wide], second[mine, wide], shift[mine]]
    local[4] = local[4][:, columns]
    local = [v.clone().requires_grad_() for v in local]
    result, gathered, before = npu_alltoall_allgather_bmm(
        local[0],
        local[1],
        ep,
        2,
        tp,
        2,
        bias=local[2],
        shard_type=shard,
        act_type="ReLU",
        need_allgather_out=True,
        need_activation_feature=True,
    )
    assert gathered.shape == (2, 2 * capacity, hidden)
    close(result, torch.relu(before))
    close(gathered, x[:, mine].transpose(0, 1).reshape(2, -1, hidden))
    back = npu_bmm_reducescatter_alltoall(result, local[3], ep, 2, tp, 2, bias=local[4], shard_type=shard)
    close(back, expected[e][:, rows, columns])
    back.backward(outer[e][:, rows, columns])
    close(local[0].grad, whole[0].grad[e][:, rows, columns])
    close(local[1].grad, whole[1].grad[mine, :, wide])
    close(local[2].grad, whole[2].grad[mine, wide])
    close(local[3].grad, whole[3].grad[mine, wide])


def test_products_with_communication_equal_those_of_one_process():
    run_world(two_ranks, 2)


def test_experts_over_expert_and_tensor_parallel_ranks_equal_those_of_one_process():
    run_world(four_ranks, 4)


class Times(torch.utils._python_dispatch.TorchDispatchMode):
    """A clock that products and collectives set forward; one link that carries one collective at a time."""

    def __init__(self, product, transfer):
        super().__init__()
        self.product, self.transfer = product, transfer
        self.now = self.free = self.computed = self.carried = 0.0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            cost = self.product * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
            self.now, self.computed = self.now + cost, self.computed + cost
        return function(*args, **(kwargs or {}))

    def collective(self, large, *others, group, async_op):
        assert async_op
        cost = self.transfer * max(tensor.numel() for tensor in (large, *others))
        self.free = max(self.now, self.free) + cost
        self.carried += cost
        return Arrival(self, self.free)


class Arrival:
    def __init__(self, times, at):
        self.times, self.at = times, at

    def wait(self):
        self.times.now = max(self.times.now, self.at)


@pytest.mark.parametrize("transfer", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("product", [product_summed, product_scattered, product_of_gathered])
def test_communication_of_one_part_runs_while_another_is_multiplied(product, parts, transfer, monkeypatch):
    """However slow the link, only one part of the shorter of the two is not hidden."""
    times = Times(1.0 / 16, transfer)
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        monkeypatch.setattr(dist, name, times.collective)
    with times:
        product(torch.ones(32, 16), torch.ones(16, 16), SimpleNamespace(size=lambda: 2), parts)
    longer, shorter = max(times.computed, times.carried), min(times.computed, times.carried)
    assert shorter > 0
    assert times.now <= longer + shorter / parts * 1.1


def test_operators_that_communicate_need_a_process_group():
    with pytest.raises(ContractError, match="there are no process groups yet"):
        matmul_all_reduce(torch.randn(2, 3), torch.randn(3, 4))
