"""Matrix products joined with a collective: gather before them, or sum or scatter after them.

Rows are worked on in parts, so that the communication of one part runs while another is multiplied
(communication over computation). The bias is added after the communication. On NPUs the kernels with built-in
communication take over where they can (MC2).

Each operator takes ``[m, k]`` rows, a ``[k, n]`` weight (a transposed view is fine), a bias ``[n]`` or
``[1, n]``, and a group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_kernels.call import Call
from mindspeed_kernels.contract import NPU_FLOATING, Choice, ContractError, Dtype, Rank, SameDtype, SameSize
from mindspeed_kernels.ops import collectives
from mindspeed_kernels.ops.availability import ascend_generation, torch_npu_missing
from mindspeed_kernels.ops.operator import Operator
from mindspeed_kernels.ops.process_groups import hccl_name, process_group

logger = logging.getLogger("mindspeed_kernels.ops")

Group = ProcessGroup | str | None
"""A process group, its name, or None for all ranks."""

_CONTRACT = (
    Rank("x", 2, 2),
    Rank("weight", 2, 2),
    Dtype("x"),
    SameDtype(("x", "weight")),
    SameSize("weight", 0, "x", 1),
    SameSize("bias", -1, "weight", 1),
    Choice("parts", (1, 2, 4, 8)),
)
_warned: set[tuple[int, int]] = set()


def _usable_parts(rows: int, parts: int) -> int:
    """Return the number of parts, one where the rows do not divide; warn once per shape."""
    if rows % parts == 0:
        return parts
    if (rows, parts) not in _warned:
        _warned.add((rows, parts))
        logger.warning("%d rows do not divide into %d parts: no overlap of communication", rows, parts)
    return 1


def _check_rows(operator: str, x: Tensor, group: ProcessGroup) -> None:
    if x.shape[0] % group.size():
        below = x.shape[0] // group.size() * group.size()
        raise ContractError(
            f"{operator}: rows of x must be a multiple of the group's {group.size()} ranks, got "
            f"{x.shape[0]}; nearest supported: {below} or {below + group.size()}"
        )


def _with_bias(result: Tensor, bias: Tensor | None) -> Tensor:
    return result if bias is None else result + bias


# Products and collectives in parts, without autograd.


def product_summed(x: Tensor, weight: Tensor, group: ProcessGroup, parts: int) -> Tensor:
    """Return ``[m, n]``: the product summed over the group, part by part."""
    parts = _usable_parts(x.shape[0], parts)
    result = x.new_empty(x.shape[0], weight.shape[1])
    works = []
    for rows, out in zip(x.chunk(parts), result.chunk(parts), strict=True):
        torch.mm(rows, weight, out=out)
        works.append(dist.all_reduce(out, group=group, async_op=True))
    for work in works:
        work.wait()
    return result


def product_of_gathered(
    x: Tensor, weight: Tensor, group: ProcessGroup, parts: int, *, keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return ``[w * m, n]`` and, to ``keep``, the gathered rows ``[w * m, k]`` in rank order."""
    ranks, rows, width = group.size(), x.shape[0], x.shape[1]
    parts = _usable_parts(rows, parts)
    if parts == 1:
        gathered = collectives.gathered(x, group)
        return gathered @ weight, gathered if keep else None
    step = rows // parts
    whole = x.new_empty(ranks, parts, step, width) if keep else None
    result = x.new_empty(ranks, parts, step, weight.shape[1])
    pieces = [x.new_empty(ranks * step, width) for _ in range(parts)]
    works = [
        dist.all_gather_into_tensor(piece, chunk.contiguous(), group=group, async_op=True)
        for piece, chunk in zip(pieces, x.chunk(parts), strict=True)
    ]
    for part, (piece, work) in enumerate(zip(pieces, works, strict=True)):
        work.wait()
        result[:, part] = (piece @ weight).view(ranks, step, -1)
        if whole is not None:
            whole[:, part] = piece.view(ranks, step, width)
    return result.view(ranks * rows, -1), whole if whole is None else whole.view(ranks * rows, width)


def product_scattered(x: Tensor, weight: Tensor, group: ProcessGroup, parts: int) -> Tensor:
    """Return ``[m / w, n]``: this rank's rows of the product summed over the group, part by part."""
    ranks = group.size()
    rows = x.shape[0] // ranks
    parts = _usable_parts(rows, parts)
    step = rows // parts
    result = x.new_empty(rows, weight.shape[1])
    by_rank = x.view(ranks, parts, step, x.shape[1])
    works, sent = [], []
    for part, out in enumerate(result.chunk(parts)):
        sent.append(by_rank[:, part].reshape(ranks * step, -1) @ weight)
        works.append(dist.reduce_scatter_tensor(out, sent[-1], group=group, async_op=True))
    for work in works:
        work.wait()
    return result


_MC2_RANKS = {"910_93": (2, 4, 8, 16, 32), "950": (2, 4, 8, 16, 32)}
_MC2_WIDTHS = range(256, 65535)
"""Summed sizes that the kernels with built-in gather and scatter compute."""


def _mc2_computes(x: Tensor, weight: Tensor, group: ProcessGroup) -> bool:
    """Return whether the kernels compute a product; the same on every rank of the group.

    Asked for every product: forward and backward sum over different dimensions.
    """
    ranks = _MC2_RANKS.get(ascend_generation(), (2, 4, 8))
    return group.size() in ranks and weight.shape[0] in _MC2_WIDTHS and x.numel() * weight.numel() > 0


def mc2_sums(x: Tensor, weight: Tensor, group: ProcessGroup) -> bool:
    """Return whether a kernel computes a product and its sum over the ranks; the same on every rank.

    Only generation 910B has one.
    """
    return (
        ascend_generation() in ("", "910B")
        and group.size() in (1, 2, 4, 8)
        and x.numel() * weight.numel() > 0
    )


def _mc2_summed(x: Tensor, weight: Tensor, group: ProcessGroup, parts: int) -> Tensor:
    import torch_npu

    if not mc2_sums(x, weight, group):
        return product_summed(x, weight, group, parts)
    result: Tensor = torch_npu.npu_mm_all_reduce_base(
        x.contiguous(), weight, hccl_name(group), reduce_op="sum"
    )
    return result


def _mc2_gathered(
    x: Tensor, weight: Tensor, group: ProcessGroup, parts: int, *, keep: bool = True
) -> tuple[Tensor, Tensor | None]:
    import torch_npu

    if not _mc2_computes(x, weight, group):
        return product_of_gathered(x, weight, group, parts, keep=keep)
    result, whole = torch_npu.npu_all_gather_base_mm(
        x.contiguous(), weight, hccl_name(group), group.size(), gather_index=0, gather_output=True
    )
    return result, whole if keep else None


def _mc2_scattered(x: Tensor, weight: Tensor, group: ProcessGroup, parts: int) -> Tensor:
    import torch_npu

    if not _mc2_computes(x, weight, group):
        return product_scattered(x, weight, group, parts)
    result: Tensor = torch_npu.npu_mm_reduce_scatter_base(
        x.contiguous(), weight, hccl_name(group), group.size(), reduce_op="sum"
    )
    return result


class Products(NamedTuple):
    """One way to multiply and communicate; each takes rows, weight, group and number of parts.

    ``gathered`` returns the gathered rows beside the product, None with ``keep=False``.
    """

    summed: Callable[..., Tensor]
    gathered: Callable[..., tuple[Tensor, Tensor | None]]
    scattered: Callable[..., Tensor]


PARTS = Products(product_summed, product_of_gathered, product_scattered)
MC2 = Products(_mc2_summed, _mc2_gathered, _mc2_scattered)


class _MatmulAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, parts: int, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        return products.summed(x, weight, group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = gradients[0] @ weight.t() if ctx.needs_input_grad[0] else None
        dw = x.t() @ gradients[0] if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None


class _AllGatherMatmul(torch.autograd.Function):
    """Gathers again in backward instead of keeping the gathered rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, parts: int, products: Products
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.how = (group, parts, products)
        result, whole = products.gathered(x, weight, group, parts)
        assert whole is not None
        ctx.mark_non_differentiable(whole)
        return result, whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, parts, products = ctx.how
        dy = gradients[0].contiguous()
        dx = products.scattered(dy, weight.t(), group, parts) if ctx.needs_input_grad[0] else None
        dw = collectives.gathered(x, group).t() @ dy if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup, parts: int, products: Products
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = (group, parts, products)
        _check_rows("matmul_reduce_scatter", x, group)
        return products.scattered(x, weight, group, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, parts, products = ctx.how
        dx, dy = products.gathered(gradients[0].contiguous(), weight.t(), group, parts)
        dw = x.t() @ dy if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, None


def matmul_all_reduce_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Group = None, parts: int = 1
) -> Tensor:
    """Compute ``sum over ranks of (x · weight) + bias``.

    Args:
        x: ``[m, k]``.
        weight: ``[k, n]``.
        bias: ``[n]`` or ``[1, n]``, added once, after the sum.
        group: whose ranks are summed.
        parts: in how many parts the rows are worked on; 1 where they do not divide.

    Returns:
        ``[m, n]``. Its gradient is taken to be the same on every rank.
    """
    return _with_bias(collectives.all_reduce(x @ weight, process_group(group, "group")), bias)


def all_gather_matmul_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Group = None, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute ``gather(x) · weight + bias``, and the gathered rows (without gradient).

    Args:
        x: ``[m / w, k]``, this rank's rows.
        weight: ``[k, n]``.
        bias: ``[n]`` or ``[1, n]``.
        group: whose rows are gathered, in rank order.
        parts: in how many parts the rows are worked on; 1 where they do not divide.

    Returns:
        ``[m, n]`` and ``[m, k]``.
    """
    whole = collectives.all_gather(x, process_group(group, "group"))
    return _with_bias(whole @ weight, bias), whole.detach()


def matmul_reduce_scatter_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Group = None, parts: int = 1
) -> Tensor:
    """Compute this rank's rows of ``sum over ranks of (x · weight)``, ``+ bias``.

    Args:
        x: ``[m, k]``, ``m`` a multiple of the group's size.
        weight: ``[k, n]``.
        bias: ``[n]`` or ``[1, n]``; every rank adds it to its rows, so its gradients are partial sums.
        group: whose ranks are summed.
        parts: in how many parts the rows are worked on; 1 where they do not divide.

    Returns:
        ``[m / w, n]``.
    """
    ranks = process_group(group, "group")
    _check_rows("matmul_reduce_scatter", x, ranks)
    return _with_bias(collectives.reduce_scatter(x @ weight, ranks), bias)


matmul_all_reduce = Operator("matmul_all_reduce", matmul_all_reduce_reference, contract=_CONTRACT)
all_gather_matmul = Operator("all_gather_matmul", all_gather_matmul_reference, contract=_CONTRACT)
matmul_reduce_scatter = Operator("matmul_reduce_scatter", matmul_reduce_scatter_reference, contract=_CONTRACT)


def _adding_bias(function: type[torch.autograd.Function], products: Products) -> Callable[..., Any]:
    """Build a backend from an autograd function; what it returns besides the product is passed on."""

    def call(
        x: Tensor, weight: Tensor, bias: Tensor | None = None, group: Group = None, parts: int = 1
    ) -> Any:
        found = function.apply(x, weight, process_group(group, "group"), parts, products)
        if isinstance(found, tuple):
            return _with_bias(found[0], bias), *found[1:]
        return _with_bias(found, bias)

    return call


def _mc2_range(call: Call) -> str:
    return "" if call.dtype("x") in (torch.float16, torch.bfloat16) else "its kernels take half precision"


for _operator, _function in (
    (matmul_all_reduce, _MatmulAllReduce),
    (all_gather_matmul, _AllGatherMatmul),
    (matmul_reduce_scatter, _MatmulReduceScatter),
):
    _operator.backend("parts", ("*",))(_adding_bias(_function, PARTS))
    _operator.backend(
        "mc2",
        ("npu",),
        priority=10,
        available=torch_npu_missing,
        supports=_mc2_range,
        contract=(Dtype("x", NPU_FLOATING), Choice("parts", (1,))),
    )(_adding_bias(_function, MC2))
