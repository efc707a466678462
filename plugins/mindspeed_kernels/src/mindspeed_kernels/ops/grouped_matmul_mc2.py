"""Grouped products joined with an exchange between ranks, before the product or behind it.

Tokens' rows travel to the ranks of their experts and are multiplied there, `all2all_grouped_matmul`, or are
multiplied and travel back, `grouped_matmul_all2all`: each is the other's gradient with respect to the rows. A
dense product of shared experts can run beside the exchange. On NPUs kernels with built-in communication take
over where every rank's call is within their limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import HALF, Contract, Dtype, Holds, Rank, SameDtype, SameSize
from mindspeed_kernels.ops.availability import ascend_generation, kernel_of
from mindspeed_kernels.ops.expert_exchange import Counts, Group, Routing, routing_of
from mindspeed_kernels.ops.gmm import grouped_matmul, npu_weight_gradients
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.process_groups import hccl_name

Result = Tensor | tuple[Tensor, Tensor]


def all2all_grouped_matmul_reference(
    inputs: Tensor,
    weights: Tensor,
    group: Group,
    send_counts: Counts,
    recv_counts: Counts,
    shared_inputs: Tensor | None = None,
    shared_weight: Tensor | None = None,
) -> Result:
    """Send rows to their experts' ranks and compute ``y_e = x_e · W_e`` there.

    Args:
        inputs: ``[m, k]``, this rank's rows by the rank of their expert, then by expert.
        weights: ``[e, k, n]`` of this rank's experts.
        group: expert parallelism, a group or its name; every rank has ``e`` experts.
        send_counts: ``[ranks * e]``, list or integer tensor: how many rows go to each expert of each rank.
        recv_counts: ``[ranks * e]``: how many rows of each rank arrive for each of this rank's experts.
        shared_inputs: ``[b, h]``, further rows, that every rank multiplies itself.
        shared_weight: ``[h, o]``.

    Returns:
        ``[sum(recv_counts), n]``, rows by expert, then by the rank they come from; with ``shared_inputs``
        also ``[b, o]``.

    Raises:
        ContractError: counts do not fit rows, experts and ranks.
    """
    name = "all2all_grouped_matmul"
    routing = routing_of(name, inputs, weights, group, send_counts, recv_counts, to_experts=True)
    result = grouped_matmul(routing.to_experts(inputs), weights, routing.ends())
    return _with_shared(result, shared_inputs, shared_weight)


def grouped_matmul_all2all_reference(
    inputs: Tensor,
    weights: Tensor,
    group: Group,
    send_counts: Counts,
    recv_counts: Counts,
    shared_inputs: Tensor | None = None,
    shared_weight: Tensor | None = None,
) -> Result:
    """Compute ``y_e = x_e · W_e`` and send rows back to their tokens' ranks.

    Args:
        inputs: ``[m, k]``, rows of this rank's experts, by expert, then by the rank they go to.
        weights: ``[e, k, n]`` of this rank's experts.
        group: expert parallelism, a group or its name; every rank has ``e`` experts.
        send_counts: ``[ranks * e]``, list or integer tensor: how many rows of each of this rank's experts go
            to each rank, by rank, then expert.
        recv_counts: ``[ranks * e]``: how many rows come from each expert of each rank.
        shared_inputs: ``[b, h]``, further rows, that every rank multiplies itself.
        shared_weight: ``[h, o]``.

    Returns:
        ``[sum(recv_counts), n]``, rows by the rank they come from, then by expert; with ``shared_inputs``
        also ``[b, o]``.

    Raises:
        ContractError: counts do not fit rows, experts and ranks.
    """
    name = "grouped_matmul_all2all"
    routing = routing_of(name, inputs, weights, group, send_counts, recv_counts, to_experts=False)
    result = routing.to_tokens(grouped_matmul(inputs, weights, routing.ends()))
    return _with_shared(result, shared_inputs, shared_weight)


def _with_shared(result: Tensor, shared_inputs: Tensor | None, shared_weight: Tensor | None) -> Result:
    if shared_inputs is None or shared_weight is None:
        return result
    return result, shared_inputs @ shared_weight


def _both_or_none(call: Call) -> tuple[Any, Any] | None:
    if call.given("shared_inputs") == call.given("shared_weight"):
        return None
    return "one of shared_inputs and shared_weight", "both or none"


CONTRACT: Contract = (
    Rank("inputs", 2, 2),
    Rank("weights", 3, 3),
    Dtype("inputs"),
    SameDtype(("inputs", "weights")),
    SameSize("weights", 1, "inputs", 1),
    Holds("shared_weight", "comes with shared_inputs", _both_or_none),
    Rank("shared_inputs", 2, 2),
    Rank("shared_weight", 2, 2),
    Dtype("shared_inputs"),
    SameDtype(("shared_inputs", "shared_weight")),
    SameSize("shared_weight", 0, "shared_inputs", 1),
)
"""Rules of both operators."""

all2all_grouped_matmul = Operator(
    "all2all_grouped_matmul",
    all2all_grouped_matmul_reference,
    contract=CONTRACT,
    saved="the rows that arrived, and the weights",
)
grouped_matmul_all2all = Operator(
    "grouped_matmul_all2all", grouped_matmul_all2all_reference, contract=CONTRACT, saved="rows and weights"
)

_RANKS = {"910_93": (8, 16, 32, 64), "950": (4, 8, 16, 32, 64)}
"""Sizes of groups that the kernels of a generation take; older versions of CANN take no others."""
_EXPERTS, _EXPERTS_OF_ALL = 32, 256
_WIDTHS, _SHARED_WIDTHS = range(1, 65536), range(1, 12289)
_MOST_ROWS = 52428800
_BYTES_OF_PAIR = range(2 * 2**20, 100 * 2**20 + 1)
"""Bytes that a generation 910_93 sends between two ranks; it refuses none, for instance."""
_TOP_K = range(2, 9)
"""Rows of tokens that there may be for each shared one."""


def _kernels_compute(inputs: Tensor, weights: Tensor, routing: Routing, *, backward: bool) -> bool:
    """Tell whether the kernels compute a call; every rank of the group hears the same.

    Their limits on rows depend on the routing, so that the ranks have to ask one another: a kernel would wait
    for a rank that computes without it.
    """
    group, (experts, k, n) = routing.group, weights.shape
    if (
        group.size() not in _RANKS.get(ascend_generation(), ())
        or experts not in range(1, _EXPERTS + 1)
        or experts * group.size() > _EXPERTS_OF_ALL
        or k not in _WIDTHS
        or n not in _WIDTHS
    ):
        return False
    within = all(0 < sum(counts) < _MOST_ROWS for counts in (routing.of_tokens, routing.of_experts))
    if ascend_generation() == "910_93":
        pairs = routing.by_rank(routing.of_tokens) + routing.by_rank(routing.of_experts)
        widths = (k, n) if backward else (k,)
        within = within and all(2 * rows * width in _BYTES_OF_PAIR for rows in pairs for width in widths)
    everywhere = torch.tensor(float(within), device=inputs.device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
    return within and everywhere.item() > 0


class _Shared(NamedTuple):
    """The product of shared experts beside an exchange; ``of_kernel`` are its arguments of a kernel."""

    of_kernel: dict[str, Any]
    computed: Tensor | None


def _shared(
    x: Tensor | None, weight: Tensor | None, dtype: torch.dtype, routing: Routing, *, transposed: bool
) -> _Shared:
    """Hand the product of shared experts to the kernel, or compute it where that takes none of its size."""
    if x is None or weight is None:
        return _Shared({}, None)
    rows, shared = sum(routing.of_tokens), x.shape[0]
    if (
        x.dtype == dtype
        and shared > 0
        and rows % shared == 0
        and rows // shared in _TOP_K
        and all(width in _SHARED_WIDTHS for width in weight.shape)
    ):
        return _Shared({"mm_x": x, "mm_weight": weight, "trans_mm_weight": transposed}, None)
    return _Shared({}, x @ (weight.t() if transposed else weight))


def _npu_to_experts(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    shared_x: Tensor | None,
    shared_weight: Tensor | None,
    *,
    transposed: bool = False,
    keep: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Exchange, then multiply; also the product of shared experts and, to ``keep``, the rows that arrived."""
    import torch_npu

    shared = _shared(shared_x, shared_weight, x.dtype, routing, transposed=transposed)
    result, of_shared, rows = torch_npu.npu_alltoallv_gmm(
        x,
        weights,
        hccl_name(routing.group),
        routing.group.size(),
        routing.of_tokens,
        routing.of_experts,
        trans_gmm_weight=transposed,
        permute_out_flag=keep,
        **shared.of_kernel,
    )
    return result, of_shared if shared.computed is None else shared.computed, rows


def _npu_to_tokens(
    x: Tensor,
    weights: Tensor,
    routing: Routing,
    shared_x: Tensor | None,
    shared_weight: Tensor | None,
    *,
    transposed: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Multiply, then exchange; also the product of shared experts."""
    import torch_npu

    shared = _shared(shared_x, shared_weight, x.dtype, routing, transposed=transposed)
    result, of_shared = torch_npu.npu_gmm_alltoallv(
        x,
        weights,
        hccl_name(routing.group),
        routing.group.size(),
        routing.of_experts,
        routing.of_tokens,
        trans_gmm_weight=transposed,
        **shared.of_kernel,
    )
    return result, of_shared if shared.computed is None else shared.computed


class ToExpertsOnNpu(torch.autograd.Function):
    """`all2all_grouped_matmul` by the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weights: Tensor,
        shared_inputs: Tensor | None,
        shared_weight: Tensor | None,
        routing: Routing,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the products of experts and shared experts."""
        result, of_shared, rows = _npu_to_experts(
            inputs, weights, routing, shared_inputs, shared_weight, keep=ctx.needs_input_grad[1]
        )
        ctx.save_for_backward(weights, shared_inputs, shared_weight, rows)
        ctx.routing = routing
        return result, of_shared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_shared: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and shared experts."""
        weights, shared_inputs, shared_weight, rows = ctx.saved_tensors
        dy = dy.contiguous()
        dx, dx_shared = _npu_to_tokens(dy, weights, ctx.routing, d_shared, shared_weight, transposed=True)
        dw = None if rows is None else npu_weight_gradients(rows, dy, ctx.routing.ends())
        return dx, dw, dx_shared, _product(shared_inputs, d_shared), None


class ToTokensOnNpu(torch.autograd.Function):
    """`grouped_matmul_all2all` by the kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weights: Tensor,
        shared_inputs: Tensor | None,
        shared_weight: Tensor | None,
        routing: Routing,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the products of experts and shared experts."""
        ctx.save_for_backward(inputs, weights, shared_inputs, shared_weight)
        ctx.routing = routing
        return _npu_to_tokens(inputs, weights, routing, shared_inputs, shared_weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, d_shared: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of rows, weights and shared experts."""
        inputs, weights, shared_inputs, shared_weight = ctx.saved_tensors
        dx, dx_shared, rows = _npu_to_experts(
            dy.contiguous(),
            weights,
            ctx.routing,
            d_shared,
            shared_weight,
            transposed=True,
            keep=ctx.needs_input_grad[1],
        )
        dw = None if rows is None else npu_weight_gradients(inputs, rows, ctx.routing.ends())
        return dx, dw, dx_shared, _product(shared_inputs, d_shared), None


def _product(x: Tensor | None, dy: Tensor | None) -> Tensor | None:
    return None if x is None or dy is None else x.t() @ dy


def _on_npu(
    operator: Operator[..., Result], function: type[torch.autograd.Function], *, to_experts: bool
) -> Callable[..., Result]:
    """Build the backend of an operator: the kernels where every rank's call is within their limits."""

    def call(
        inputs: Tensor,
        weights: Tensor,
        group: Group,
        send_counts: Counts,
        recv_counts: Counts,
        shared_inputs: Tensor | None = None,
        shared_weight: Tensor | None = None,
    ) -> Result:
        routing = routing_of(
            operator.name, inputs, weights, group, send_counts, recv_counts, to_experts=to_experts
        )
        operands = (inputs, weights, shared_inputs, shared_weight)
        backward = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
        if not _kernels_compute(inputs, weights, routing, backward=backward):
            return operator.reference(
                inputs, weights, group, send_counts, recv_counts, shared_inputs, shared_weight
            )
        result, of_shared = function.apply(*operands, routing)
        return result if of_shared is None else (result, of_shared)

    return call


for _operator, _function, _to_experts in (
    (all2all_grouped_matmul, ToExpertsOnNpu, True),
    (grouped_matmul_all2all, ToTokensOnNpu, False),
):
    _operator.backend("npu", ("npu",), available=kernel_of(*_RANKS), contract=(Dtype("inputs", HALF),))(
        _on_npu(_operator, _function, to_experts=_to_experts)
    )
