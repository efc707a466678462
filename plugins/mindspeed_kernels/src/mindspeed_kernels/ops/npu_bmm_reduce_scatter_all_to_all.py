"""The experts' second product, sum and scatter over tensor parallelism, and the way back to the tokens'
ranks.

The mirror of `npu_all_to_all_all_gather_bmm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_kernels.contract import ContractError
from mindspeed_kernels.ops.npu_all_to_all_all_gather_bmm import (
    CONTRACT,
    Group,
    groups,
    return_rows,
    scatter_dimension,
)
from mindspeed_kernels.ops.operator import Operator


def npu_bmm_reducescatter_alltoall_reference(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    group_ep_worldsize: int,
    group_tp: Group,
    group_tp_worldsize: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
) -> Tensor:
    """Compute ``return(scatter(sum over tp of (x · weight)) + bias)``.

    Args:
        x: ``[E / ep, ep * C, M / tp]``, rows in the order of `npu_alltoall_allgather_bmm`.
        weight: ``[E / ep, M / tp, H]``.
        group_ep: expert parallelism; every row goes back to the rank it came from.
        group_ep_worldsize: its size.
        group_tp: tensor parallelism.
        group_tp_worldsize: its size.
        bias: ``[E / ep, H / tp]`` or with a 1 in the middle; ``H`` wide with ``shard_type`` 1.
        shard_type: 0 scatters the hidden dimension over tensor parallelism, 1 the rows.

    Returns:
        ``[E, C, H / tp]`` with ``shard_type`` 0, ``[E, C / tp, H]`` with 1.
    """
    name = "npu_bmm_reducescatter_alltoall"
    ep, tp = groups(name, group_ep, group_ep_worldsize, group_tp, group_tp_worldsize)
    parts = ep.size() * (tp.size() if shard_type else 1)
    if x.shape[1] % parts or (not shard_type and weight.shape[2] % tp.size()):
        raise ContractError(
            f"{name}: {x.shape[1]} rows and {weight.shape[2]} columns do not divide among {ep.size()} x "
            f"{tp.size()} ranks with shard_type {shard_type}"
        )
    product = torch.bmm(x, weight)
    by_source = product.reshape(product.shape[0], ep.size(), -1, product.shape[2])
    shard = scatter_dimension(by_source, 3 if shard_type == 0 else 2, tp)
    if bias is not None:
        shard = shard + bias.reshape(bias.shape[0], 1, 1, bias.shape[-1])
    return return_rows(shard, ep)


npu_bmm_reducescatter_alltoall = Operator(
    "npu_bmm_reducescatter_alltoall",
    npu_bmm_reducescatter_alltoall_reference,
    contract=CONTRACT,
    saved="the rows and the weight",
)
