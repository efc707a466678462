"""Exchange between experts, gather over tensor parallelism, and the experts' first product.

Capacities are equal, so that everything is a batched product. The mirror is
`npu_bmm_reduce_scatter_all_to_all`; each is the other's gradient with respect to the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_kernels.contract import Choice, Contract, ContractError, Dtype, Rank, SameDtype
from mindspeed_kernels.ops import collectives
from mindspeed_kernels.ops.activations import PLAIN, activation_named
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.process_groups import process_group

Group = ProcessGroup | str

CONTRACT: Contract = (
    Rank("x", 3, 3),
    Rank("weight", 3, 3),
    Dtype("x"),
    SameDtype(("x", "weight")),
    Rank("bias", 2, 3),
    Choice("shard_type", (0, 1)),
)
"""Rules of the operator and its mirror."""


def groups(
    operator: str, group_ep: Group, ep_world_size: int, group_tp: Group, tp_world_size: int
) -> tuple[ProcessGroup, ProcessGroup]:
    """Return both groups after a check of their sizes.

    Raises:
        ContractError: a size is wrong, or both are the same group.
    """
    found = []
    for argument, group, size in (("ep", group_ep, ep_world_size), ("tp", group_tp, tp_world_size)):
        resolved = process_group(group, f"{operator}: group_{argument}")
        if resolved.size() != size:
            raise ContractError(
                f"{operator}: {argument}_world_size must be the size of group_{argument}, {resolved.size()}, "
                f"got {size}"
            )
        found.append(resolved)
    if found[0] is found[1]:
        raise ContractError(f"{operator}: group_ep and group_tp must be different groups")
    return found[0], found[1]


def exchange_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Bring ``[E, C, h]`` to ``[E / ep, ep, C, h]``: the rows of this rank's experts from every rank."""
    exchanged = collectives.all_to_all(x.reshape(group.size(), -1, *x.shape[1:]), group)
    return exchanged.transpose(0, 1)


def return_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    """Bring ``[E / ep, ep, C, h]`` to ``[E, C, h]``: the inverse of `exchange_rows`."""
    returned = collectives.all_to_all(x.transpose(0, 1).contiguous(), group)
    return returned.reshape(-1, *returned.shape[2:])


def gather_dimension(x: Tensor, dimension: int, group: ProcessGroup) -> Tensor:
    """Return the tensors of a group behind one another along a dimension."""
    return collectives.all_gather(x.movedim(dimension, 0), group).movedim(0, dimension)


def scatter_dimension(x: Tensor, dimension: int, group: ProcessGroup) -> Tensor:
    """Return this rank's part along a dimension of the sum over a group."""
    return collectives.reduce_scatter(x.movedim(dimension, 0), group).movedim(0, dimension)


def npu_alltoall_allgather_bmm_reference(
    x: Tensor,
    weight: Tensor,
    group_ep: Group,
    group_ep_worldsize: int,
    group_tp: Group,
    group_tp_worldsize: int,
    *,
    bias: Tensor | None = None,
    shard_type: int = 0,
    act_type: str = "None",
    need_allgather_out: bool = False,
    need_activation_feature: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``activation(gather(exchange(x)) · weight + bias)``.

    Args:
        x: ``[E, C, H / tp]`` with ``shard_type`` 0, ``[E, C / tp, H]`` with 1.
        weight: ``[E / ep, H, M / tp]``.
        group_ep: expert parallelism; the rows of each expert go to the rank that has it.
        group_ep_worldsize: its size.
        group_tp: tensor parallelism.
        group_tp_worldsize: its size.
        bias: ``[E / ep, M / tp]`` or ``[E / ep, 1, M / tp]``.
        shard_type: 0 gathers the hidden dimension over tensor parallelism, 1 the rows.
        act_type: ``None``, ``gelu``, ``silu``, ``relu``, ``fastgelu``.
        need_allgather_out: hand out the gathered rows.
        need_activation_feature: hand out the product before the activation.

    Returns:
        ``[E / ep, ep * C, M / tp]``, then the gathered rows ``[E / ep, ep * C, H]`` and the product before
        the activation, each empty where it was not asked for. Rows are ordered by expert-parallel rank, then
        by tensor-parallel rank, then by position.
    """
    name = "npu_alltoall_allgather_bmm"
    ep, tp = groups(name, group_ep, group_ep_worldsize, group_tp, group_tp_worldsize)
    if x.shape[0] % ep.size():
        raise ContractError(f"{name}: {x.shape[0]} experts do not divide among {ep.size()} ranks")
    exchanged = exchange_rows(x, ep)
    whole = gather_dimension(exchanged, 3 if shard_type == 0 else 2, tp)
    rows = whole.reshape(whole.shape[0], -1, whole.shape[3])
    product = torch.bmm(rows, weight)
    if bias is not None:
        product = product + (bias if bias.dim() == 3 else bias.unsqueeze(1))
    result = product
    if act_type.lower() != "none":
        result = activation_named(name, act_type, PLAIN)(product)
    empty = x.new_empty(0)
    return result, rows if need_allgather_out else empty, product if need_activation_feature else empty


npu_alltoall_allgather_bmm = Operator(
    "npu_alltoall_allgather_bmm",
    npu_alltoall_allgather_bmm_reference,
    contract=(*CONTRACT, Choice("act_type", ("None", *PLAIN))),
    saved="the gathered rows, the weight, and the product before the activation",
)
