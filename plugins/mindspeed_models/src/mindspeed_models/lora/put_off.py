"""A product whose weight's gradient a pipeline schedule computes when it says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Leave = Callable[..., None]
"""Takes a computation and its operands, and calls it with them, later or at once."""


@dataclass(frozen=True)
class _Behind:
    """A parameter that is no input of the graph."""

    parameter: Tensor


class _PutOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, behind: _Behind, leave: Leave) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.leave = behind.parameter, leave
        return torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        parameter = ctx.parameter

        def compute(x: Tensor, gradient: Tensor) -> None:
            found = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            # Through the parameter's own node of the graph, on which data parallelism waits.
            parameter.backward(found)

        ctx.leave(compute, x, gradient)
        return gradient @ weight, None, None, None


def product_put_off(x: Tensor, weight: Tensor, leave: Leave) -> Tensor:
    """Compute ``x Wᵀ``, whose weight learns when ``leave`` says.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``, a parameter.
        leave: takes the computation of its gradient.

    Returns:
        ``[..., n]``.
    """
    if not x.requires_grad or not torch.is_grad_enabled():
        return F.linear(x, weight)
    # As a number: an input of the graph would be told that it has no gradient, and data parallelism with it.
    found: Tensor = _PutOff.apply(x, weight.detach(), _Behind(weight), leave)
    return found
