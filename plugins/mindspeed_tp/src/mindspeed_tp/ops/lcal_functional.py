"""``coc_ops`` of MindSpeed whole: the operators of mindspeed-kernels, and those that know a grid of ranks.

Groups of ranks are those of ``torch.distributed``; a communication domain has nothing to name here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_core.errors import UserError
from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.collectives import gathered, scattered_sum
from mindspeed_kernels.ops.lcal_functional import CoCOperations
from mindspeed_tp.grid.place import Place, here


@dataclass(frozen=True)
class CoCConfig:
    """The place of a rank that a script gives MindSpeed's operators.

    Attributes:
        rank_id: of this rank in its tensor-parallel group.
        rank_size: of the group.
        comm_domain: name of a communicator; not used.
    """

    rank_id: int
    rank_size: int
    comm_domain: str


@dataclass(frozen=True)
class TP2DConfig:
    """A grid of ranks, from the side of one product.

    Attributes:
        ag_dim: ranks whose rows are gathered.
        rs_dim: ranks whose products are summed.
        inner_dim_is_ag: rows are gathered over neighbouring ranks, the x groups of ``--tp-2d``.
    """

    ag_dim: int
    rs_dim: int
    inner_dim_is_ag: bool


class GridOperations(CoCOperations):
    """The operators; ``coc_ops`` is the one instance that callers use."""

    def set_comm_config(self, config: CoCConfig) -> None:
        """Check that a configuration describes this rank's tensor-parallel group; nothing is kept of it.

        Raises:
            UserError: the group is another one.
        """
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_model_parallel_group()
        if (config.rank_id, config.rank_size) != (group.rank(), group.size()):
            raise UserError(
                f"set_comm_config: rank {config.rank_id} of {config.rank_size} is not this rank's place in "
                f"tensor parallelism, {group.rank()} of {group.size()}; operators communicate over that "
                "group, or over the one they are given"
            )

    def all_gather_matmul_reduce_scatter(
        self,
        input1: Tensor,
        input2: Tensor,
        output: Tensor,
        tp2d_config: TP2DConfig,
        bias: Tensor | None = None,
        place: Place | None = None,
    ) -> Tensor:
        """Return ``output``: this rank's rows of the sum of ``gather(input1) · weightᵀ``, ``+ bias``.

        Args:
            input1: ``[m / ag_dim, k]``.
            input2: the weight ``[n, k]``.
            output: ``[m / rs_dim, n]``, written.
            tp2d_config: the grid.
            bias: ``[n]`` or ``[1, n]``, added once, after the sum.
            place: this rank's groups; by default those of the open session's ``--tp-2d``.

        Raises:
            ContractError: the grid is another one, or the shapes do not fit.
        """
        place = place or here()
        gather, scatter = (place.x, place.y) if tp2d_config.inner_dim_is_ag else (place.y, place.x)
        _check(input1, input2, output, tp2d_config, gather, scatter)
        with torch.no_grad():
            result = scattered_sum(gathered(input1, gather) @ input2.t(), scatter)
            return output.copy_(result if bias is None else result + bias)


def _check(
    x: Tensor, weight: Tensor, output: Tensor, config: TP2DConfig, gather: ProcessGroup, scatter: ProcessGroup
) -> None:
    given, sizes = (config.ag_dim, config.rs_dim), (gather.size(), scatter.size())
    if given != sizes:
        raise ContractError(
            f"all_gather_matmul_reduce_scatter: tp2d_config has ag_dim {given[0]} and rs_dim {given[1]}, the "
            f"grid gathers over {sizes[0]} and sums over {sizes[1]} ranks; make it of --tp-x and --tp-y"
        )
    rows = x.shape[0] * gather.size()
    wanted = (rows // scatter.size(), weight.shape[0])
    if x.shape[1] != weight.shape[1] or rows % scatter.size() or tuple(output.shape) != wanted:
        raise ContractError(
            f"all_gather_matmul_reduce_scatter: {tuple(x.shape)} and the weight {tuple(weight.shape)} give "
            f"{wanted} on {sizes[0]} by {sizes[1]} ranks, the output has {tuple(output.shape)}"
        )


coc_ops = GridOperations()
set_comm_config = coc_ops.set_comm_config
all_gather_matmul_reduce_scatter = coc_ops.all_gather_matmul_reduce_scatter
