"""The one autograd function of planned linears: gather, product, sum, and all of it backwards.

Backward issues its collectives in one order on every rank: the gather of the input, the gather of the
result's gradient, and what brings the input's gradient back, which runs beside the product for the weight's
gradient. What nobody needs (the input of a frozen weight, the gradient of an input that has none) is neither
gathered nor multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers as megatron_layers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_tp.plan import DIRECT, LinearPlan
from mindspeed_tp.products import call
from mindspeed_tp.rows import Pending, Rows, start_sum


@dataclass(frozen=True)
class Communication:
    """The groups of one call of a planned linear.

    Attributes:
        gather: over whom the input's rows are spread; None where the rank has them all.
        reduce: over whom products are summed; None where the rank's own is the result.
        scatter: leave each rank of ``reduce`` its rows of the sum, instead of the whole.
        input_gradient: over whom the input's gradient is summed, where all ranks have the same input.
    """

    gather: Rows | None = None
    reduce: Rows | None = None
    scatter: bool = False
    input_gradient: ProcessGroup | None = None


Leave = Callable[..., None]
"""Takes the computation of a weight's gradient and the tensors to call it with, later or at once."""


@dataclass
class DelayedGradients:
    """Gradients of one weight that ``backward`` left to be computed later, oldest first."""

    waiting: list[Callable[[], None]] = field(default_factory=list)

    def leave(self, compute: Callable[..., None], *operands: Tensor) -> None:
        """Keep a computation for `compute_oldest`."""
        self.waiting.append(partial(compute, *operands))

    def compute_oldest(self) -> None:
        """Compute the gradient that waits longest, and add it to those of the weight."""
        if self.waiting:
            self.waiting.pop(0)()


@dataclass(frozen=True)
class How:
    """Everything about a call but its tensors.

    Attributes:
        plan: the policies.
        groups: the communication.
        accumulate: add the weight's gradient to ``weight.main_grad`` in place.
        leave: takes computations of the weight's gradient; None computes it in backward.
        keep_gathered: keep the gathered input for the weight's gradient instead of gathering it again.
    """

    plan: LinearPlan
    groups: Communication
    accumulate: bool = False
    leave: Leave | None = None
    keep_gathered: bool = False


class PlannedLinearFunction(torch.autograd.Function):
    """``y = sum over ranks of (gathered x · weightᵀ) + bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        """Compute the result.

        Args:
            ctx: of autograd.
            x: ``[s, b, k]``, or this rank's rows of it.
            weight: ``[n, k]``.
            bias: ``[n]``, of a linear without ``reduce``.
            how: policies and groups.

        Returns:
            ``[s, b, n]``, or this rank's rows of it.
        """
        ctx.how, ctx.has_bias = how, bias is not None
        # Hooks on saved tensors make another tensor of a saved weight, whose ``grad`` nobody reads.
        ctx.parameter = weight
        # Layers that share a weight would change it in each other's saved tensors.
        ctx.main_grad = getattr(weight, "main_grad", None) if how.accumulate else None
        batch = x.shape[1:-1]
        rows = _flat(x)
        result, whole = _forward(rows, weight.t(), how, _per_row(batch))
        keeps = whole if how.keep_gathered and ctx.needs_input_grad[1] else None
        ctx.save_for_backward(rows if keeps is None else keeps, weight)
        ctx.kept_whole = keeps is not None
        ctx.batch = batch
        # No view for autograd: whoever takes the result may change it in place, a loss its logits.
        result = torch.ops.aten._unsafe_view(result, (-1, *batch, result.shape[-1]))
        return result if bias is None else result + bias

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of input, weight and bias."""
        saved, weight = ctx.saved_tensors
        how: How = ctx.how
        groups = how.groups
        per_row = _per_row(ctx.batch)
        wants_input, wants_weight = ctx.needs_input_grad[:2]
        own = dy = _flat(gradients[0])

        gather = None if ctx.kept_whole or groups.gather is None else groups.gather.times(per_row)
        whole: Pending | None = None
        if wants_weight and gather is not None and how.leave is None:
            whole = gather.start_gather(saved)
        dx, dy = _adjoint(dy, weight, how, wants_input, per_row)
        x = saved if whole is None else whole()
        pending = None if dx is None else _return_gradient(dx, groups, per_row)

        dw = None
        if wants_weight and how.leave is None:
            dw = _computed(ctx.parameter, dy, x, how.accumulate, ctx.main_grad)
        elif wants_weight and how.leave is not None:
            how.leave(_later(ctx.parameter, gather, how.accumulate, ctx.main_grad), dy, saved)
        # Of the rows this rank added it to.
        db = own.sum(dim=0) if ctx.has_bias else None
        dx = dx if pending is None else pending()
        if dx is not None:
            dx = dx.view(-1, *ctx.batch, dx.shape[-1])
        return dx, dw, db, None


def _forward(x: Tensor, weight: Tensor, how: How, per_row: int) -> tuple[Tensor, Tensor | None]:
    """Return the result without bias, and the input with the rows of all ranks, where it is kept."""
    plan, groups = how.plan, how.groups
    gather = None if groups.gather is None else groups.gather.times(per_row)
    reduce = None if groups.reduce is None else groups.reduce.times(per_row)
    if gather is not None:
        joined = gather.even and (reduce is None or plan.reduce.executor == DIRECT)
        if joined:
            y, whole = call(plan.gather, "gathered", x, weight, gather.group, keep=how.keep_gathered)()
            if reduce is None:
                return y, whole
            return _reduced(y, reduce, groups.scatter), whole
        x = gather.start_gather(x)()
    if reduce is None:
        return x @ weight, x
    if not reduce.even:
        return _reduced(x @ weight, reduce, groups.scatter), x
    kind = "scattered" if groups.scatter else "summed"
    result: Tensor = call(plan.reduce, kind, x, weight, reduce.group)()
    return result, x


def _reduced(y: Tensor, reduce: Rows, scatter: bool) -> Tensor:
    return reduce.start_scatter(y)() if scatter else start_sum(y, reduce.group)()


def _adjoint(
    dy: Tensor, weight: Tensor, how: How, wanted: bool, per_row: int
) -> tuple[Tensor | None, Tensor]:
    """Return the input's gradient on all rows, where it is wanted, and the whole gradient of the result."""
    groups = how.groups
    if groups.reduce is None or not groups.scatter:
        return (dy @ weight if wanted else None), dy
    reduce = groups.reduce.times(per_row)
    if wanted and reduce.even:
        dx, dy = call(how.plan.adjoint, "gathered", dy, weight, reduce.group)()
        return dx, dy
    dy = reduce.start_gather(dy)()
    return (dy @ weight if wanted else None), dy


def _return_gradient(dx: Tensor, groups: Communication, per_row: int) -> Pending | None:
    """Start the collective that brings the input's gradient back to the ranks that hold the input."""
    if groups.gather is not None:
        return groups.gather.times(per_row).start_scatter(dx)
    if groups.input_gradient is not None:
        return start_sum(dx, groups.input_gradient)
    return None


def _later(
    weight: Tensor, gather: Rows | None, accumulate: bool, main_grad: Any
) -> Callable[[Tensor, Tensor], None]:
    """Return what computes the weight's gradient and adds it; the input is gathered then, not kept whole."""

    @torch.no_grad()
    def compute(dy: Tensor, x: Tensor) -> None:
        whole = x if gather is None else gather.start_gather(x)()
        found = _computed(weight, dy, whole, accumulate, main_grad)
        if found is not None:
            # What was added in place stands for a gradient that nobody reads.
            weight.grad = found if weight.grad is None or accumulate else weight.grad + found

    return compute


def _computed(weight: Any, dy: Tensor, x: Tensor, accumulate: bool, main_grad: Any) -> Tensor | None:
    """Return the weight's gradient ``[n, k]``, or add it to ``main_grad`` as megatron-core's linears do."""
    if not accumulate:
        return dy.t().matmul(x)
    weight.main_grad = main_grad
    provider: Any = megatron_layers.fused_weight_gradient_mlp_cuda
    wide = main_grad.dtype == torch.float32
    (provider.wgrad_gemm_accum_fp32 if wide else provider.wgrad_gemm_accum_fp16)(x, dy, main_grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    # Hooks of data parallelism want a gradient to run on the thread that runs backward; nobody reads it.
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(main_grad.shape, dtype=x.dtype, device=x.device)


def _flat(x: Tensor) -> Tensor:
    """Return ``[s, b, k]`` as rows ``[s * b, k]``."""
    return x.contiguous().view(-1, x.shape[-1])


def _per_row(batch: torch.Size) -> int:
    return batch.numel() if batch else 1
