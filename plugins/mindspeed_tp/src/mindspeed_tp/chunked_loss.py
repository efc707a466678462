"""Output layer and cross entropy in one step, a part of the sequence at a time.

The logits of the whole sequence never exist: forward makes those of a part, takes the losses and drops them;
backward makes them once more. What is kept are the input of the output layer and two numbers per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as megatron_layers
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from mindspeed_tp.rows import Rows, start_sum


@dataclass(frozen=True)
class LossPlan:
    """Plan of a loss computed in chunks.

    Attributes:
        chunks: parts of the sequence.
        group: ranks that hold the vocabulary together.
        rows: over whom the input's rows are spread; None where each rank has them all.
        accumulate: add the weight's gradient to ``weight.main_grad`` in place.
        kept: ids from here on take no part; None for all rows.
    """

    chunks: int
    group: ProcessGroup
    rows: Rows | None = None
    accumulate: bool = False
    kept: int | None = None

    def logits(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return the logits ``[s, b, v / t]`` of this rank in float32, without those of ids left out."""
        logits = (rows @ weight.t()).float()
        if self.kept is not None:
            first = max(0, self.kept - self.group.rank() * weight.shape[0])
            logits[..., first:] = torch.finfo(torch.float32).min
        return logits


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of the target over the vocabulary of all ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, plan: LossPlan) -> Tensor:
        """Compute the losses.

        Args:
            ctx: of autograd.
            hidden: ``[s, b, h]``, or this rank's rows of it.
            weight: ``[v / t, h]``.
            labels: ``[b, s]`` int64.
            plan: how.

        Returns:
            ``[b, s]`` float32.
        """
        ctx.plan = plan
        # Hooks on saved tensors make another tensor of a saved weight, whose attributes nobody reads.
        ctx.parameter = weight
        ctx.main_grad = getattr(weight, "main_grad", None) if plan.accumulate else None
        whole = hidden if plan.rows is None else plan.rows.start_gather(hidden)()
        first = plan.group.rank() * weight.shape[0]
        losses, tops, sums = [], [], []
        targets = labels.t()
        for rows, target in zip(whole.chunk(plan.chunks), targets.chunk(plan.chunks), strict=True):
            predicted, top, summed = _parts_of_loss(rows, weight, target, first, plan)
            losses.append(torch.log(summed) - predicted)
            tops.append(top)
            sums.append(summed)
        ctx.save_for_backward(hidden, weight, targets, torch.cat(tops), torch.cat(sums))
        return torch.cat(losses).t().contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of input and weight."""
        hidden, weight, targets, tops, sums = ctx.saved_tensors
        plan: LossPlan = ctx.plan
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        whole = hidden if plan.rows is None else plan.rows.start_gather(hidden)()
        first = plan.group.rank() * weight.shape[0]
        of_losses = gradients[0].t()
        dhidden = torch.empty_like(whole) if wants_hidden else None
        learned = _WeightGradient(ctx.parameter, ctx.main_grad) if wants_weight else None
        start = 0
        for rows, target in zip(whole.chunk(plan.chunks), targets.chunk(plan.chunks), strict=True):
            here = slice(start, start + rows.shape[0])
            start += rows.shape[0]
            numbers = tops[here].unsqueeze(-1), sums[here].unsqueeze(-1), of_losses[here].unsqueeze(-1)
            dlogits = _gradient_of_logits(rows, weight, target, first, plan, numbers)
            if dhidden is not None:
                torch.matmul(dlogits, weight, out=dhidden[here])
            if learned is not None:
                learned.add(dlogits.flatten(0, 1), rows.flatten(0, 1))
            # Logits of two parts are never alive together.
            del dlogits
        if dhidden is not None and plan.rows is not None:
            dhidden = plan.rows.start_scatter(dhidden)()
        elif dhidden is not None and plan.group.size() > 1:
            dhidden = start_sum(dhidden, plan.group)()
        return dhidden, None if learned is None else learned.result(), None, None


def _parts_of_loss(
    rows: Tensor, weight: Tensor, target: Tensor, first: int, plan: LossPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's logit of its target, largest logit, and sum of exponentials, less the largest one.

    The logits end with this function, so that those of two parts are never alive together.
    """
    group = plan.group
    logits = plan.logits(rows, weight)
    top = logits.max(dim=-1)[0]
    if group.size() > 1:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits -= top.unsqueeze(-1)
    local, place = _place(target, first, weight.shape[0])
    found = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    predicted = torch.where(local, found, torch.zeros_like(found))
    both = torch.stack((predicted, logits.exp_().sum(dim=-1)))
    if group.size() > 1:
        dist.all_reduce(both, group=group)
    return both[0], top, both[1]


def _gradient_of_logits(
    rows: Tensor,
    weight: Tensor,
    target: Tensor,
    first: int,
    plan: LossPlan,
    numbers: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Return ``softmax - onehot`` times the gradient of the loss; numbers are largest, sum and gradient."""
    top, summed, of_loss = numbers
    share = plan.logits(rows, weight)
    share -= top
    share.exp_().div_(summed)
    local, place = _place(target, first, weight.shape[0])
    share.scatter_add_(-1, place.unsqueeze(-1), -local.to(share.dtype).unsqueeze(-1))
    return share.mul_(of_loss).to(rows.dtype)


class _WeightGradient:
    """The gradient of a weight, added up over parts: in float32 whatever the weight's dtype, or in place."""

    def __init__(self, weight: Any, main_grad: Tensor | None) -> None:
        self.weight, self.main_grad = weight, main_grad
        self.total = None if main_grad is not None else torch.zeros(weight.shape, device=weight.device)
        if self.total is not None and weight.dtype == torch.float64:
            self.total = self.total.double()

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Add ``dyᵀ · x``."""
        if self.main_grad is not None:
            provider: Any = megatron_layers.fused_weight_gradient_mlp_cuda
            wide = self.main_grad.dtype == torch.float32
            (provider.wgrad_gemm_accum_fp32 if wide else provider.wgrad_gemm_accum_fp16)(
                x, dy, self.main_grad
            )
        elif self.total is not None and self.total.dtype == dy.dtype:
            self.total.addmm_(dy.t(), x)
        elif self.total is not None:
            self.total += (dy.t() @ x).to(self.total.dtype)

    def result(self) -> Tensor | None:
        """Return the gradient; None, or what nobody reads, where it was added in place."""
        if self.total is not None:
            return self.total.to(self.weight.dtype)
        assert self.main_grad is not None
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return None
        self.weight.grad_added_to_main_grad = True
        make = torch.zeros if getattr(self.weight, "zero_out_wgrad", False) else torch.empty
        return make(self.main_grad.shape, dtype=self.weight.dtype, device=self.weight.device)


def _place(target: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return which targets are on this rank, and where; 0 for others."""
    local = (target >= first) & (target < first + size)
    return local, torch.where(local, target - first, 0)
