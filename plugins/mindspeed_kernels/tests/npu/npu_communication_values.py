"""Products with built-in communication on two value devices, against their parts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from mindspeed_kernels import device_measurements
from mindspeed_kernels.device_measurements import problems
from mindspeed_kernels.measured_calls import BETWEEN_RANKS, Sizes
from mindspeed_kernels.ops.lcal_functional import coc_ops
from mindspeed_kernels.ops.npu_all_to_all_all_gather_bmm import npu_alltoall_allgather_bmm
from mindspeed_kernels.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reducescatter_alltoall
from mindspeed_kernels.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.overlapped_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from mindspeed_testing.npu.device import COMPUTED, running_test
from mindspeed_testing.npu.value_training import run_value_world, value_session

RANKS, ROWS, WIDE, OUT = 2, 8, 256, 32


def products_of_a_rank():
    """Results and gradients of each product on this rank, and what they must be."""
    rank, world = dist.get_rank(), dist.group.WORLD
    make = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(RANKS, *shape, generator=make).to(torch.bfloat16)

    xs, weights, upstream = numbers(ROWS, WIDE), numbers(WIDE, OUT), numbers(RANKS * ROWS, OUT)
    products = [x.float() @ w.float() for x, w in zip(xs, weights)]
    mine = slice(rank * ROWS // RANKS, (rank + 1) * ROWS // RANKS)
    expected = {
        "reduce": sum(products),
        "scatter": sum(products)[mine],
        "gather": torch.cat([x.float() for x in xs]) @ weights[rank].float(),
    }
    operators = {"reduce": matmul_all_reduce, "scatter": matmul_reduce_scatter, "gather": all_gather_matmul}
    found, gradients = {}, {}
    with value_session() as device:
        for name, operator in operators.items():
            x, weight = (t[rank].to("npu").requires_grad_() for t in (xs, weights))
            result = operator(x, weight, None, world)
            result = result[0] if isinstance(result, (tuple, list)) else result
            found[name] = result.detach().cpu().float()
            (result * upstream[0, : result.shape[0]].to("npu")).sum().backward()
            gradients[name] = x.grad.isfinite().all().item(), weight.grad.isfinite().all().item()
        counted = dict(device.operations)
    return found, expected, gradients, counted, tuple(COMPUTED)


@pytest.mark.parametrize("name", ["reduce", "scatter", "gather"])
def test_a_product_with_communication_computes_what_its_parts_do(ranks, name):
    for found, expected, gradients, _, computed in (rank.products for rank in ranks):
        torch.testing.assert_close(found[name], expected[name], rtol=2e-2, atol=0.3)
        assert gradients[name] == (True, True)
        for operation in computed:
            COMPUTED.setdefault(operation, running_test())


def test_the_device_s_kernels_did_it(ranks):
    for *_, counted, _ in (rank.products for rank in ranks):
        names = {name.split(".")[1] for name in counted}
        assert {"npu_mm_all_reduce_base", "npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"} <= names


class Groups:
    """Groups of two ranks: all, and each rank by itself."""

    def __init__(self):
        alone = [dist.new_group([rank]) for rank in range(RANKS)]
        self.both, self.alone = dist.group.WORLD, alone[dist.get_rank()]


def experts(wide, groups, shard, *, expert_ranks, tensor_ranks):
    """Two layers of four experts, rows there and back."""
    (ep, tp), sizes = groups, (expert_ranks, tensor_ranks)
    capacity, hidden = (6, 8 // sizes[1]) if shard == 0 else (6 // sizes[1], 8)
    x, first = wide(4, capacity, hidden), wide(4 // sizes[0], 8, 16 // sizes[1])
    second, shift = wide(4 // sizes[0], 16 // sizes[1], 8), wide(4 // sizes[0], hidden)
    options = {"shard_type": shard, "act_type": "silu", "need_allgather_out": True}
    y, gathered, _ = npu_alltoall_allgather_bmm(x, first, ep, sizes[0], tp, sizes[1], **options)
    back = npu_bmm_reducescatter_alltoall(y, second, ep, sizes[0], tp, sizes[1], bias=shift, shard_type=shard)
    return (back, gathered)


def over_experts(wide, groups, shard):
    both = (groups.both, groups.alone)
    return experts(wide, both, shard, expert_ranks=RANKS, tensor_ranks=1)


def over_tensors(wide, groups, shard):
    both = (groups.alone, groups.both)
    return experts(wide, both, shard, expert_ranks=1, tensor_ranks=RANKS)


def in_parts(wide, groups, parts):
    """Every product of coc, its communication in parts beside the multiplication of others."""
    x, weight, bias = wide(ROWS, 16), wide(16, OUT), wide(1, OUT)
    gathered = all_gather_matmul(x, weight, bias, groups.both, parts)
    scattered = matmul_reduce_scatter(x, weight, bias, groups.both, parts)
    return (*gathered, scattered, matmul_all_reduce(x, weight, bias, groups.both, parts))


def in_place(wide, groups, _):
    """Products of coc as scripts call them, which write what they are given."""
    x, weight, output = wide(ROWS, 16).detach(), wide(16, OUT).detach(), wide(ROWS, OUT).detach()
    coc_ops.matmul_all_reduce(x, weight, output)
    return (output,)


def with_norm(wide, groups, _):
    given = wide(2, ROWS, WIDE), wide(WIDE, OUT), wide(2, ROWS, OUT), wide(OUT)
    return npu_mm_all_reduce_add_rms_norm(*given, groups.both)


def in_groups(wide, groups, _):
    """Lists of products, each summed over the ranks; for inference."""
    pairs = [wide(3, 16).detach(), wide(5, 16).detach()], [wide(16, OUT).detach() for _ in range(2)]
    return npu_grouped_mat_mul_all_reduce(*pairs, groups.both, split_item=0)


CASES = {
    "alltoall-bmm over experts": (over_experts, (0, 1)),
    "alltoall-bmm over tensor-parallel ranks": (over_tensors, (0, 1)),
    "coc in parts": (in_parts, (1, 2, 4)),
    "coc in place": (in_place, (None,)),
    "mm-all-reduce-add-rms-norm": (with_norm, (None,)),
    "grouped-matmul-all-reduce": (in_groups, (None,)),
}


def outcomes(device, groups):
    """Results and gradients of every case on a device, on the host in float32."""
    found = {}
    for name, (call, options) in CASES.items():
        made = torch.Generator().manual_seed(dist.get_rank())
        leaves = []

        def wide(*shape, generator=made, leaves=leaves):
            numbers = torch.randn(*shape, generator=generator) / 4
            leaves.append(numbers.to(torch.bfloat16).to(device).requires_grad_())
            return leaves[-1]

        results = [result for option in options for result in call(wide, groups, option)]
        followed = [result for result in results if result.requires_grad]
        if followed:
            sum(result.float().square().sum() for result in followed).backward()
        tensors = [*results, *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        found[name] = [tensor.detach().float().cpu() for tensor in tensors]
    return found


def cases_of_a_rank(groups):
    """Every case on a value device and on the CPU."""
    on_cpu = outcomes("cpu", groups)
    with value_session() as device:
        on_device = outcomes("npu", groups)
        counted = dict(device.operations)
    return on_cpu, on_device, counted, tuple(COMPUTED)


def measured(groups):
    """Return a measurement of each operator that communicates."""
    device_measurements.RUNS = 1
    device_measurements._wait = lambda device: None
    with value_session():
        sizes = Sizes("npu", small=True, group=groups.both, alone=groups.alone)
        return list(device_measurements._kernels(BETWEEN_RANKS, sizes))


class Rank(NamedTuple):
    """Results of one rank."""

    products: tuple
    cases: tuple
    measurements: list


def everything():
    """Return the results of this rank: one world is enough for all tests."""
    dist.init_process_group("gloo")
    groups = Groups()
    found = Rank(products_of_a_rank(), cases_of_a_rank(groups), measured(groups))
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_value_world(everything, RANKS)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_two_devices_are_those_of_the_cpu(ranks, name):
    for on_cpu, on_device, _, computed in (rank.cases for rank in ranks):
        assert len(on_cpu[name]) == len(on_device[name]) > 0
        for got, wanted in zip(on_device[name], on_cpu[name]):
            # Both round sums to bfloat16, in another order.
            assert (got - wanted).norm() <= 1e-2 * wanted.norm()
        for operation in computed:
            COMPUTED.setdefault(operation, running_test())


def test_operators_that_communicate_are_measured_beside_their_references(ranks):
    for results in (rank.measurements for rank in ranks):
        assert problems(results) == []
        assert [result for result in results if "error" in result] == []
        assert {result["of"] for result in results} == set(BETWEEN_RANKS)
