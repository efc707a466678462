"""Executors: a product joined with a gather before it, or with a sum after it, without autograd.

The chunked and the fused ones are those of mindspeed-kernels. The ring is here: ranks pass their rows on to
the next rank and meanwhile multiply those they have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mindspeed_kernels.ops.availability import torch_npu_missing
from mindspeed_kernels.ops.overlapped_matmul import MC2, PARTS, Products
from mindspeed_tp.plan import FUSED, RING, Execution


def ring_product_of_gathered(
    x: Tensor, weight: Tensor, group: ProcessGroup, parts: int, *, keep: bool = True
) -> tuple[Tensor, Tensor]:
    """Return ``[w * m, n]`` and the gathered rows ``[w * m, k]``: each rank's rows go once around the ring.

    Args:
        x: ``[m, k]``, this rank's rows.
        weight: ``[k, n]``.
        group: whose rows are gathered, in rank order.
        parts: not used: a step of the ring is a part.
        keep: not used: the rows are there.
    """
    ranks, me = group.size(), group.rank()
    rows, width = x.shape
    whole = x.new_empty(ranks, rows, width)
    result = x.new_empty(ranks, rows, weight.shape[1])
    whole[me] = x
    following = dist.get_global_rank(group, (me + 1) % ranks)
    preceding = dist.get_global_rank(group, (me - 1) % ranks)
    for step in range(ranks):
        own, coming = (me - step) % ranks, (me - step - 1) % ranks
        works: list[Any] = []
        if step < ranks - 1:
            # In one batch: both neighbours of a ring of two are the same rank, whose stream would hold a send
            # alone until its receive, which stands behind a send there too.
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, whole[own], following, group),
                    dist.P2POp(dist.irecv, whole[coming], preceding, group),
                ]
            )
        torch.mm(whole[own], weight, out=result[own])
        for work in works:
            if work is not None:
                work.wait()
    return result.view(ranks * rows, -1), whole.view(ranks * rows, width)


def executor(execution: Execution, x: Tensor) -> Products:
    """Return the products of an execution for operands like ``x``.

    On a device without kernels for the fused ones, and outside half precision, rows are worked on in the
    parts of the execution.
    """
    if execution.executor == RING:
        return PARTS._replace(gathered=ring_product_of_gathered)
    half = x.dtype in (torch.bfloat16, torch.float16)
    if execution.executor == FUSED and x.device.type == "npu" and half and not torch_npu_missing():
        return MC2
    return PARTS


def call(
    execution: Execution, kind: str, x: Tensor, weight: Tensor, group: ProcessGroup, **options: bool
) -> Callable[[], Any]:
    """Return the call of one product, with the number of parts of its shape.

    Args:
        execution: who executes it.
        kind: ``gathered``, ``scattered`` or ``summed``.
        x: ``[m, k]``.
        weight: ``[k, n]``.
        group: whose ranks communicate.
        options: of ``gathered``.
    """
    rows = x.shape[0] * (group.size() if kind == "gathered" else 1)
    parts = execution.parts_of((rows, x.shape[1], weight.shape[1]))
    return partial(getattr(executor(execution, x), kind), x, weight, group, parts, **options)
