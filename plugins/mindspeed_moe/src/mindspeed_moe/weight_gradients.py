"""Weight gradients of experts that backward computes later than the gradients of their rows.

A weight enters a product through an anchor, an autograd node of its own. The product's backward returns the
gradient of its rows at once and leaves to the anchor what the weight's gradient is made of; the anchor
computes it where its place in the graph is. Autograd takes the ready node that was created last, so an anchor
created right after the launch of an all-to-all is reached while the mirrored all-to-all is in flight. The
gradient itself is handed over like any other: hooks of data parallelism see it when it is there. A pipeline
schedule that computes weight gradients apart takes over from the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_kernels.ops.gmm_put_off import Leave, add_weight_gradient, weight_gradient


class LaterGradient:
    """The gradient of one weight in one call of a layer.

    Attributes:
        token: number of shape ``[]`` that carries the dependency from the product to the anchor.
    """

    def __init__(self, parameter: torch.nn.Parameter, leave: Leave | None = None) -> None:
        """Create the anchor here in the graph; reads no value of the parameter.

        Args:
            parameter: the weight.
            leave: takes the computation, for later or at once; without it the anchor computes.
        """
        self._parameter, self._put_off = parameter, leave
        self._work: Operands | None = None
        self.token: Tensor = _Anchor.apply(parameter, self)

    def leave(self, work: Operands) -> None:
        """Keep what the gradient is made of."""
        self._work = work

    def compute(self) -> Tensor | None:
        """Return the gradient in the parameter's shape; None where it was added, or is left to somebody."""
        work, self._work = self._work, None
        if work is None:
            return None
        rows = work.rows() if callable(work.rows) else work.rows
        if self._put_off is not None:
            add = partial(
                add_weight_gradient,
                self._parameter,
                ends=work.ends,
                shape=work.shape,
                accumulates=work.accumulates,
            )
            self._put_off(add, rows, work.gradients)
            return None
        return weight_gradient(
            self._parameter, rows, work.gradients, work.ends, work.shape, accumulates=work.accumulates
        )


@dataclass(frozen=True)
class Operands:
    """Operands of a weight's gradient.

    Attributes:
        rows: ``[m, k]``, or a function that returns them when they are needed.
        gradients: ``[m, n]``, of the product.
        ends: ``[E]``, where the rows of each expert end.
        shape: ``[E, k, n]``, of the weight.
        accumulates: add it to the main gradient.
    """

    rows: Tensor | Callable[[], Tensor]
    gradients: Tensor
    ends: Tensor
    shape: torch.Size
    accumulates: bool


class _Anchor(Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, later: LaterGradient) -> Tensor:
        ctx.later = later
        return parameter.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        return ctx.later.compute(), None


def product_with_later_gradient(
    rows: Tensor, weight: Tensor, ends: Tensor, later: LaterGradient, *, accumulates: bool
) -> Tensor:
    """Compute the grouped product whose weight learns later.

    Args:
        rows: ``[m, k]``, rows of the experts behind one another.
        weight: ``[E, k, n]``, a view of the parameter of ``later``.
        ends: ``[E]`` int64, where the rows of each expert end.
        later: of the parameter and this call.
        accumulates: add the gradient to the parameter's main gradient.

    Returns:
        ``[m, n]``.
    """
    result: Tensor = _Product.apply(rows, weight.detach(), ends, later.token, later, accumulates)
    return result


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        ends: Tensor,
        token: Tensor,
        later: LaterGradient,
        accumulates: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, ends)
        ctx.later, ctx.accumulates = later, accumulates
        return grouped_matmul(rows, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        to_rows = to_token = None
        if ctx.needs_input_grad[3]:
            ctx.later.leave(Operands(rows, gradient, ends, weight.shape, ctx.accumulates))
            to_token = gradient.new_zeros(())
        if ctx.needs_input_grad[0]:
            to_rows = grouped_matmul(gradient, weight.transpose(1, 2), ends)
        return to_rows, None, None, to_token, None, None
