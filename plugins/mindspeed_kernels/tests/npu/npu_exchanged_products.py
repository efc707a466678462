"""Grouped products with an exchange on four value devices: values, gradients, and what the kernels refuse."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from mindspeed_kernels.ops import all2all_grouped_matmul, checking, grouped_matmul_all2all
from mindspeed_kernels.ops.availability import ascend_generation
from mindspeed_testing.npu import Call, fake_world, run_call
from mindspeed_testing.npu.device import COMPUTED, running_test
from mindspeed_testing.npu.kernels.contract import Arguments, KernelRefusal
from mindspeed_testing.npu.kernels.grouped_exchange import ALLTOALLV_GMM, GMM_ALLTOALLV
from mindspeed_testing.npu.soc import PRODUCTS, announcing
from mindspeed_testing.npu.stubs import SOC
from mindspeed_testing.npu.value_training import run_value_world, value_session

RANKS, EXPERTS, WIDE, OUT, SHARED_ROWS = 4, 2, 16, 24, 4
COUNTS = (
    ((2, 0), (1, 1), (0, 3), (1, 0)),
    ((0, 1), (3, 1), (2, 0), (1, 0)),
    ((4, 0), (0, 0), (1, 1), (1, 1)),
    ((0, 5), (1, 0), (1, 0), (0, 1)),
)
"""Rows by the rank of their tokens, then by the rank and number of their expert."""
OPERATORS = (all2all_grouped_matmul, grouped_matmul_all2all)


def routed(kind):
    """The counts of a kind of call."""
    counts = torch.tensor(COUNTS)
    if kind == "a rank without rows":
        counts[2] = 0
    return counts


def numbers(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def call(operator, rank, device, counts, shared):
    """Results and gradients of one rank, in float32 on the host."""
    tokens, experts = counts[rank].flatten(), counts[:, rank].flatten()
    sent, received = (tokens, experts) if operator is all2all_grouped_matmul else (experts, tokens)
    given = [numbers(rank, int(sent.sum()), WIDE), numbers(10 + rank, EXPERTS, WIDE, OUT)]
    if shared:
        given += [numbers(20 + rank, SHARED_ROWS, 8), numbers(30 + rank, 8, 12)]
    leaves = [one.to(device).requires_grad_() for one in given]
    results = operator(*leaves[:2], dist.group.WORLD, sent.tolist(), received, *leaves[2:])
    results = results if isinstance(results, tuple) else (results,)
    outer = [numbers(40 + rank + 10 * i, *one.shape).to(device) for i, one in enumerate(results)]
    torch.autograd.backward(results, outer)
    return [one.detach().float().cpu() for one in (*results, *(leaf.grad for leaf in leaves))]


def every_case():
    """Largest differences from the CPU, and kernels that ran, by operator and kind of routing."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    with value_session("950") as device, checking():
        ascend_generation.cache_clear()
        for operator in OPERATORS:
            for kind in ("alone", "with shared experts", "a rank without rows"):
                counts, shared = routed(kind), kind == "with shared experts"
                before = dict(device.operations)
                on_npu = call(operator, rank, "npu", counts, shared)
                names = {n.split(".")[1] for n, c in device.operations.items() if c > before.get(n, 0)}
                wanted = call(operator, rank, "cpu", counts, shared)
                for got, one in zip(on_npu, wanted, strict=True):
                    torch.testing.assert_close(got, one, rtol=3e-2, atol=0.1)
                found[operator.name, kind] = sorted(names & {"npu_alltoallv_gmm", "npu_gmm_alltoallv"})
    dist.destroy_process_group()
    return found, tuple(COMPUTED)


@pytest.fixture(scope="module")
def world():
    return run_value_world(every_case, RANKS)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@pytest.mark.parametrize("kind", ["alone", "with shared experts"])
def test_a_product_and_an_exchange_are_computed_by_the_kernels_in_both_directions(world, operator, kind):
    for found, computed in world:
        assert found[operator.name, kind] == ["npu_alltoallv_gmm", "npu_gmm_alltoallv"]
        for operation in computed:
            COMPUTED.setdefault(operation, running_test())


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_with_a_rank_without_rows_none_of_the_ranks_asks_the_kernels(world, operator):
    assert [found[operator.name, "a rank without rows"] for found, _ in world] == [[]] * RANKS


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_calls_bind_to_the_device_s_schemas_in_both_directions(operator):
    counts = [256] * 8
    call = Call(
        operator.name,
        lambda *tensors: operator(*tensors[:2], dist.group.WORLD, counts, counts, *tensors[2:]),
        lambda npu: [
            npu.tensor(*shape, requires_grad=True)
            for shape in ((2048, 4096), (1, 4096, 4096), (512, 64), (64, 32))
        ],
        operations=("npu_alltoallv_gmm", "npu_gmm_alltoallv"),
    )
    with mock.patch.dict(os.environ, {SOC: PRODUCTS["910_93"][0]}), announcing("910_93"), checking():
        ascend_generation.cache_clear()
        try:
            with fake_world(8):
                shapes = [tuple(result.shape) for result in run_call(call).results]
        finally:
            ascend_generation.cache_clear()
    assert shapes == [(2048, 4096), (512, 32)]


@pytest.fixture
def group():
    dist.init_process_group("fake", rank=0, world_size=8, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def arguments(group, soc="910_93", rows=256, wide=4096, columns=8, **changes):
    """A call of one expert per rank; 256 rows of 4096 numbers are 2 MiB."""
    ranks = group.size()
    given = {
        "gmm_x": torch.empty(ranks * rows, wide, dtype=torch.bfloat16, device="meta"),
        "gmm_weight": torch.empty(1, wide, columns, dtype=torch.bfloat16, device="meta"),
        "hcom": f"communicator-{group.group_name}",
        "ep_world_size": ranks,
        "send_counts": [rows] * ranks,
        "recv_counts": [rows] * ranks,
        **dict.fromkeys(("send_counts_tensor", "recv_counts_tensor", "mm_x", "mm_weight", "comm_mode")),
        **dict.fromkeys(("trans_gmm_weight", "trans_mm_weight", "permute_out_flag"), False),
    }
    return Arguments({**given, **changes}, soc)


@pytest.mark.parametrize("kernel", [ALLTOALLV_GMM, GMM_ALLTOALLV], ids=lambda kernel: kernel.operation)
@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"soc": "950", "rows": 1}, ""),
        ({"soc": "910B"}, "not on Ascend 910B"),
        ({"rows": 255}, "2 to 100 MiB"),
        ({"recv_counts": [0] + [300] * 7}, "2 to 100 MiB"),
        ({"soc": "950", "recv_counts": [0] * 8}, "sends and receives"),
        ({"send_counts": [256] * 7 + [255]}, "cover the rows"),
        ({"recv_counts": [256] * 7}, "counts for up to"),
        ({"columns": 65536}, "65535 wide"),
        ({"ep_world_size": 2}, "4, 8, 16"),
        ({"trans_gmm_weight": True}, "both float16 or both bfloat16"),
        ({"trans_mm_weight": True}, "mm_x"),
        ({"comm_mode": "ccu"}, "no comm_mode"),
    ],
)
def test_a_kernel_refuses_what_its_checks_do(group, kernel, changes, refused):
    given = arguments(group, **changes)
    if not refused:
        kernel.check(given)
        return
    with pytest.raises(KernelRefusal, match=refused):
        kernel.check(given)
