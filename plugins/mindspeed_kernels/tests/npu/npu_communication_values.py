"""Products with built-in communication on two value devices, against their parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mindspeed_core.testing.worlds import run_world
from mindspeed_kernels.ops.overlapped_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from mindspeed_testing.npu.device import COMPUTED, running_test
from mindspeed_testing.npu.value_training import plain_fork_server, value_session

RANKS, ROWS, WIDE, OUT = 2, 8, 256, 32


def products_of_a_rank():
    """Results and gradients of each product on this rank, and what they must be."""
    dist.init_process_group("gloo")
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
    dist.destroy_process_group()
    return found, expected, gradients, counted, tuple(COMPUTED)


@pytest.fixture(scope="module")
def world():
    with plain_fork_server():
        return run_world(products_of_a_rank, RANKS)


@pytest.mark.parametrize("name", ["reduce", "scatter", "gather"])
def test_a_product_with_communication_computes_what_its_parts_do(world, name):
    for found, expected, gradients, _, computed in world:
        torch.testing.assert_close(found[name], expected[name], rtol=2e-2, atol=0.3)
        assert gradients[name] == (True, True)
        for operation in computed:
            COMPUTED.setdefault(operation, running_test())


def test_the_device_s_kernels_did_it(world):
    for *_, counted, _ in world:
        names = {name.split(".")[1] for name in counted}
        assert {"npu_mm_all_reduce_base", "npu_mm_reduce_scatter_base", "npu_all_gather_base_mm"} <= names
