"""Grouped experts as three autograd nodes, which keep for backward what a level says.

The rows that experts received are the largest part of what they keep, although the ranks that sent them have
them anyway: they are permuted and sent a second time in backward, while gradients are computed that do not
need them. The activation is computed again from the result of the first product, and that result, where it
is not kept either, from the rows. There are three nodes, so that autograd lets go of each gradient once the
next node has read it, and so that a weight's gradient may be computed between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_megatron.instruments.passes import recomputes
from mindspeed_moe.options import ACTIVATION, DISABLED, LEVEL0, LEVEL1
from mindspeed_moe.weight_gradients import LaterGradient, Operands

if TYPE_CHECKING:
    from mindspeed_kernels.modules.grouped_experts import GroupedExperts

Arrival = Callable[[], tuple[Tensor, Tensor | None]]
"""Waits for rows ``[m, h]`` sorted by local expert, and for their probabilities ``[m]`` if they were sent."""


@dataclass(frozen=True)
class Saving:
    """Activations of one call of a layer: those kept, and those computed again.

    Attributes:
        level: one of the levels of `mindspeed_moe.options`.
        send_again: launches rows, and with True probabilities; returns what waits for them.
    """

    level: str
    send_again: Callable[[bool], Arrival]


class _Call:
    """One call of experts, and what a node leaves for the next one.

    Attributes:
        second: of the second weight.
    """

    second: LaterGradient

    def __init__(
        self,
        experts: GroupedExperts,
        weights: tuple[Tensor, Tensor],
        ends: Tensor,
        first: LaterGradient,
        saving: Saving,
    ) -> None:
        self.w1, self.w2 = (weight.detach() for weight in weights)
        self.learns = weights[0].requires_grad
        self.ends = ends
        self.first = first
        self.level = saving.level
        self.accumulates = experts.accumulates and hasattr(experts.weight1, "main_grad")
        self._activation = experts.activation_func_with_probs
        self._send_again = saving.send_again
        self._arrival: Arrival | None = None
        self._rows: Tensor | None = None
        self._leaves: tuple[Tensor, Tensor] | None = None
        self._edge: GradientEdge | None = None

    def activated(self, inner: Tensor, probs: Tensor) -> Tensor:
        """Return the weighted activation ``[m, f]`` of ``[m, g f]``."""
        result: Tensor = self._activation(inner, probs.unsqueeze(-1))
        return result

    def begin_backward(self) -> None:
        """Send rows again, where they are needed and not kept."""
        if self.level == LEVEL1 or (self.learns and self.level == LEVEL0):
            self._arrival = self._send_again(self.level == LEVEL1)

    @recomputes
    def activate_again(self, kept: tuple[Tensor, ...]) -> Tensor:
        """Compute the activation a second time, from what was kept for it; its graph stays for backward."""
        if self.level == LEVEL1:
            assert self._arrival is not None
            self._rows, probs = self._arrival()
            self._arrival = None
            inner = grouped_matmul(self._rows, self.w1, self.ends)
        else:
            inner, probs = kept
        assert probs is not None
        with torch.enable_grad():
            self._leaves = inner.detach().requires_grad_(), probs.detach().requires_grad_()
            activated = self.activated(*self._leaves)
        # The edge does not hold the result itself.
        self._edge = get_gradient_edge(activated)
        return activated.detach()

    def through_activation(self, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the first product and of the probabilities."""
        edge, leaves = self._edge, self._leaves
        assert edge is not None
        assert leaves is not None
        self._edge = self._leaves = None
        return torch.autograd.grad(edge, leaves, gradient)

    def rows(self) -> Tensor | Callable[[], Tensor]:
        """Return the rows that were not kept, or a function that waits for them."""
        rows, arrival = self._rows, self._arrival
        self._rows = self._arrival = None
        if rows is not None:
            return rows
        assert arrival is not None
        return lambda: arrival()[0]


def experts_that_save(
    experts: GroupedExperts,
    weights: tuple[Tensor, Tensor],
    rows: Tensor,
    probs: Tensor,
    ends: Tensor,
    later: tuple[LaterGradient, Callable[[], LaterGradient]],
    saving: Saving,
) -> Tensor:
    """Compute grouped experts.

    Args:
        experts: the module, inside its own call.
        weights: its weights, ``[E, h, g f/etp]`` and ``[E, f/etp, h]``.
        rows: ``[m, h]``, sorted by local expert.
        probs: ``[m]``, the router's probability of each row.
        ends: int64 ``[E]``, where the rows of each expert end.
        later: of the first weight, and what returns that of the second one; an anchor created there is
            reached in front of the gradient of the activation, and lets go of its operands.
        saving: what is kept for backward.

    Returns:
        ``[m, h]``.
    """
    call = _Call(experts, weights, ends, later[0], saving)
    inner: Tensor = _First.apply(rows, call.first.token, call)
    activated: Tensor = _Activation.apply(inner, probs, call)
    kept: tuple[Tensor, ...] = ()
    if saving.level == DISABLED:
        kept = (activated.detach(),)
    elif saving.level != LEVEL1:
        kept = inner.detach(), probs.detach()
    call.second = later[1]()
    result: Tensor = _Second.apply(activated, call.second.token, kept, call)
    return result


class _First(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, call: _Call) -> Tensor:
        ctx.save_for_backward(*((rows,) if call.level in (DISABLED, ACTIVATION) else ()))
        ctx.call = call
        return grouped_matmul(rows, call.w1, call.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        gradient = gradients[0].contiguous()
        to_token = None
        if ctx.needs_input_grad[1]:
            rows = ctx.saved_tensors[0] if ctx.saved_tensors else call.rows()
            call.first.leave(Operands(rows, gradient, call.ends, call.w1.shape, call.accumulates))
            to_token = gradient.new_zeros(())
        of_rows = grouped_matmul(gradient, call.w1.transpose(1, 2), call.ends)
        return of_rows, to_token, None


class _Activation(Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, probs: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*((inner, probs) if call.level == DISABLED else ()))
        return call.activated(inner, probs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.saved_tensors:
            ctx.call.activate_again(ctx.saved_tensors)
        return (*ctx.call.through_activation(gradients[0]), None)


class _Second(Function):
    @staticmethod
    def forward(ctx: Any, activated: Tensor, token: Tensor, kept: tuple[Tensor, ...], call: _Call) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.call = call
        return grouped_matmul(activated, call.w2, call.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        gradient = gradients[0].contiguous()
        call.begin_backward()
        of_activated = grouped_matmul(gradient, call.w2.transpose(1, 2), call.ends)
        kept = ctx.saved_tensors
        activated = kept[0] if call.level == DISABLED else call.activate_again(kept)
        to_token = None
        if ctx.needs_input_grad[1]:
            call.second.leave(Operands(activated, gradient, call.ends, call.w2.shape, call.accumulates))
            to_token = gradient.new_zeros(())
        return of_activated, to_token, None, None
