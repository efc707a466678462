"""Operators with built-in communication, as one rank of a world of four: shapes, gradients, communicators."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.npu_all_to_all_all_gather_bmm import npu_alltoall_allgather_bmm
from mindspeed_kernels.ops.npu_bmm_reduce_scatter_all_to_all import npu_bmm_reducescatter_alltoall
from mindspeed_kernels.ops.npu_grouped_mat_mul_all_reduce import npu_grouped_mat_mul_all_reduce
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm import npu_mm_all_reduce_add_rms_norm
from mindspeed_kernels.ops.npu_mm_all_reduce_add_rms_norm_ import npu_mm_all_reduce_add_rms_norm_
from mindspeed_kernels.ops.overlapped_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from mindspeed_kernels.ops.process_groups import hccl_name, process_group
from mindspeed_testing.npu import Call, FakeNpu, fake_world, run_call

RANKS = 4


@pytest.fixture
def world():
    with fake_world(RANKS, rank=1) as group:
        yield group


def tensors(*shapes: Sequence[int], **options):
    """Inputs that require grad, of these shapes."""

    def make(npu: FakeNpu):
        return [npu.tensor(*shape, requires_grad=True, **options) for shape in shapes]

    return make


def shapes(results):
    return [tuple(result.shape) for result in results]


@pytest.mark.parametrize(
    ("operator", "kernel", "expected"),
    [
        (matmul_all_reduce, "npu_mm_all_reduce_base", [(8, 32)]),
        (all_gather_matmul, "npu_all_gather_base_mm", [(8 * RANKS, 32), (8 * RANKS, 256)]),
        (matmul_reduce_scatter, "npu_mm_reduce_scatter_base", [(8 // RANKS, 32)]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_products_with_communication_use_the_device_s_kernel_and_have_a_backward(
    world, operator, kernel, expected
):
    call = Call(
        operator.name,
        lambda x, weight, bias: operator(x, weight, bias, world),
        tensors((8, 256), (256, 32), (1, 32)),
        operations=(kernel,),
    )
    assert shapes(run_call(call).results) == expected


def test_products_in_parts_communicate_by_themselves(world):
    call = Call(
        "parts",
        lambda x, weight: all_gather_matmul(x, weight, None, world, 2),
        tensors((8, 16), (16, 32)),
        operations=("_allgather_base_",),
    )
    result = run_call(call)
    assert "npu.npu_all_gather_base_mm.default" not in result.operations


NORM = ((2, 8, 16), (16, 32), (2, 8, 32), (32,))


def test_a_norm_after_the_sum_has_every_gradient(world):
    call = Call(
        "sum and norm",
        lambda x1, x2, residual, gamma: npu_mm_all_reduce_add_rms_norm(x1, x2, residual, gamma, world),
        tensors(*NORM),
        operations=("npu_mm_all_reduce_base", "npu_rms_norm", "npu_rms_norm_backward"),
    )
    assert shapes(run_call(call).results) == [(2, 8, 32), (2, 8, 32)]


def test_a_norm_in_place_of_the_residual(world):
    call = Call(
        "sum and norm in place",
        lambda *given: npu_mm_all_reduce_add_rms_norm_(*given, world),
        lambda npu: [npu.tensor(*shape) for shape in NORM],
        operations=("npu_mm_all_reduce_base",),
    )
    assert shapes(run_call(call).results) == [(2, 8, 32), (2, 8, 32)]


def test_products_of_groups_are_summed_over_ranks(world):
    call = Call(
        "grouped products",
        lambda x, y, *weights: npu_grouped_mat_mul_all_reduce([x, y], list(weights), world, split_item=0),
        lambda npu: [npu.tensor(3, 16), npu.tensor(5, 16), npu.tensor(16, 32), npu.tensor(16, 32)],
    )
    assert shapes(run_call(call).results) == [(3, 32), (5, 32)]


@pytest.fixture
def expert_world():
    with fake_world(RANKS) as group:
        experts = torch.distributed.new_group([0, 1])
        yield experts, torch.distributed.new_group([0, 2]), group


def test_experts_gather_multiply_and_return(expert_world):
    experts, tensor_parallel, _ = expert_world
    there = Call(
        "to experts",
        lambda x, weight: npu_alltoall_allgather_bmm(x, weight, experts, 2, tensor_parallel, 2)[0],
        tensors((4, 6, 8), (2, 16, 32)),
    )
    assert shapes(run_call(there).results) == [(2, 12, 32)]
    back = Call(
        "from experts",
        lambda x, weight: npu_bmm_reducescatter_alltoall(x, weight, experts, 2, tensor_parallel, 2),
        tensors((2, 12, 32), (2, 32, 16)),
    )
    assert shapes(run_call(back).results) == [(4, 6, 8)]


class Communicators:
    """Backends that note whether they were to start a communicator, which all ranks have to do together."""

    def __init__(self):
        self.started = []

    def get_hccl_comm_name(self, rank, init_comm=True):
        self.started.append(init_comm)
        return "hccl-1" if any(self.started) else ""


def test_groups_are_looked_through_without_starting_a_communicator(expert_world, monkeypatch):
    *groups, everyone = expert_world
    communicators = Communicators()
    monkeypatch.setattr(ProcessGroup, "_get_backend", lambda group, device: communicators)
    for group in (*groups, everyone):
        assert process_group(group.group_name, "group") is group
    with pytest.raises(ContractError, match="no process group is called 'hccl-1'"):
        process_group("hccl-1", "hcom")
    assert set(communicators.started) == {False}
    assert hccl_name(everyone) == "hccl-1"
    assert communicators.started[-1] is True
