"""Operators of MindSpeed that know a grid of ranks: one product over two groups, and the place of a rank."""

import pytest
import torch
import torch.distributed as dist

import mindspeed_core
from mindspeed_core.errors import UserError
from mindspeed_kernels.contract import ContractError
from mindspeed_testing.worlds import run_world
from mindspeed_tp.grid.place import Place, parts
from mindspeed_tp.ops.lcal_functional import (
    CoCConfig,
    TP2DConfig,
    all_gather_matmul_reduce_scatter,
    set_comm_config,
)

M, N, K = 8, 6, 10


def place_of(x, y):
    """The groups of this rank in a grid."""
    return Place(*(dist.new_subgroups_by_enumeration(of_axis)[0] for of_axis in parts(x, y)))


def product(x, y, inner):
    """This rank's rows, and those of one process."""
    place = place_of(x, y)
    gather, scatter = (place.x, place.y) if inner else (place.y, place.x)
    made = torch.Generator().manual_seed(3)
    rows, weight, bias = (torch.randn(*size, generator=made) for size in ((M, K), (N, K), (1, N)))
    mine = rows.chunk(scatter.size(), 1)[scatter.rank()].chunk(gather.size())[gather.rank()]
    output = torch.full((M // scatter.size(), N), torch.nan)
    found = all_gather_matmul_reduce_scatter(
        mine,
        weight.chunk(scatter.size(), 1)[scatter.rank()],
        output,
        TP2DConfig(gather.size(), scatter.size(), inner),
        bias,
        place,
    )
    assert found is output
    return output, (rows @ weight.t() + bias).chunk(scatter.size())[scatter.rank()]


def refusal(call, *given):
    with pytest.raises((ContractError, UserError)) as raised:
        call(*given)
    return str(raised.value)


def of_a_rank():
    """Products over grids, and what is refused."""
    from megatron.core import parallel_state

    with mindspeed_core.activate(["--tensor-model-parallel-size", "4"], platform="cpu"):
        dist.init_process_group("gloo")
        grids = [(x, y, inner) for x, y in ((2, 2), (4, 1)) for inner in (True, False)]
        products = [product(*grid) for grid in grids]
        place = place_of(4, 1)
        x, weight = torch.ones(2, K), torch.ones(N, K)
        refusals = [
            refusal(all_gather_matmul_reduce_scatter, x, weight, torch.empty(rows, N), config, None, place)
            for rows, config in ((8, TP2DConfig(2, 2, True)), (4, TP2DConfig(4, 1, True)))
        ]
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
        set_comm_config(CoCConfig(dist.get_rank(), 4, "127.0.0.1:5000"))
        refusals.append(refusal(set_comm_config, CoCConfig(3 - dist.get_rank(), 4, "")))
    return products, refusals


@pytest.fixture(scope="module")
def world():
    return run_world(of_a_rank, 4)


def test_rows_are_gathered_over_one_group_and_products_summed_over_the_other(world):
    for products, _ in world:
        for found, wanted in products:
            torch.testing.assert_close(found, wanted)


def test_another_grid_another_size_and_another_place_are_refused(world):
    for rank, (_, (grid, shape, place)) in enumerate(world):
        assert "ag_dim 2 and rs_dim 2, the grid gathers over 4 and sums over 1 ranks" in grid
        assert "give (8, 6) on 4 by 1 ranks, the output has (4, 6)" in shape
        assert f"rank {3 - rank} of 4 is not this rank's place in tensor parallelism, {rank} of 4" in place
