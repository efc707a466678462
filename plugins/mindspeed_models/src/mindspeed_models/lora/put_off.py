"""A product whose weight's gradient a pipeline schedule computes when it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Leave = Callable[..., None]
"""Takes a computation and its operands, and calls it with them, later or at once."""


class _PutOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, leave: Leave) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Hooks on saved tensors make another tensor of a saved weight, which has no gradient.
        ctx.parameter, ctx.leave = weight, leave
        return torch.matmul(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        parameter = ctx.parameter
        at_once: list[Tensor] = []
        within = True

        def compute(x: Tensor, gradient: Tensor) -> None:
            found = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            if within:
                at_once.append(found)
            else:
                # Through the parameter's own node of the graph, on which data parallelism waits.
                parameter.backward(found)

        ctx.leave(compute, x, gradient)
        within = False
        return gradient @ weight, (at_once[0] if at_once else None), None


def product_put_off(x: Tensor, weight: Tensor, leave: Leave) -> Tensor:
    """Compute ``x Wᵀ``, whose weight learns when ``leave`` says.

    Args:
        x: ``[..., k]``.
        weight: ``[n, k]``, a parameter.
        leave: takes the computation of its gradient.

    Returns:
        ``[..., n]``.
    """
    found: Tensor = _PutOff.apply(x, weight, leave)
    return found
