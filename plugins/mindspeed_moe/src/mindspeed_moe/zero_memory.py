"""Grouped experts that keep less for backward, and have their rows sent again.

The rows that experts received are the largest part of what they keep, although the ranks that sent them have
them anyway: they are permuted and sent a second time in backward, while gradients are computed that do not
need them. The activation is computed again from the result of the first product, and that result, where it
is not kept either, from the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mindspeed_kernels.ops.gmm import grouped_matmul
from mindspeed_moe.options import ACTIVATION, LEVEL1
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


@dataclass(frozen=True)
class _Call:
    """One call of experts.

    Attributes:
        experts: the module.
        ends: int64 ``[E]``, where the rows of each expert end.
        first: of the first weight.
        second: of the second weight.
        saving: what the call keeps.
    """

    experts: GroupedExperts
    ends: Tensor
    first: LaterGradient
    second: LaterGradient
    saving: Saving

    def activated(self, inner: Tensor, probs: Tensor) -> Tensor:
        """Return the weighted activation ``[m, f]`` of ``[m, g f]``."""
        result: Tensor = self.experts.activation_func_with_probs(inner, probs.unsqueeze(-1))
        return result


def experts_that_save(
    experts: GroupedExperts,
    weights: tuple[Tensor, Tensor],
    rows: Tensor,
    probs: Tensor,
    ends: Tensor,
    later: tuple[LaterGradient, LaterGradient],
    saving: Saving,
) -> Tensor:
    """Compute grouped experts.

    Args:
        experts: the module, inside its own call.
        weights: its weights, ``[E, h, g f/etp]`` and ``[E, f/etp, h]``.
        rows: ``[m, h]``, sorted by local expert.
        probs: ``[m]``, the router's probability of each row.
        ends: int64 ``[E]``, where the rows of each expert end.
        later: of both weights.
        saving: what is kept for backward.

    Returns:
        ``[m, h]``.
    """
    call = _Call(experts, ends, *later, saving)
    w1, w2 = (weight.detach() for weight in weights)
    result: Tensor = _SavingExperts.apply(rows, probs, w1, w2, later[0].token, later[1].token, call)
    return result


class _SavingExperts(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, t1: Tensor, t2: Tensor, call: _Call
    ) -> Tensor:
        inner = grouped_matmul(rows, w1, call.ends)
        level = call.saving.level
        kept = () if level == LEVEL1 else (inner, probs, *((rows,) if level == ACTIVATION else ()))
        ctx.save_for_backward(w1, w2, *kept)
        ctx.call = call
        return grouped_matmul(call.activated(inner, probs), w2, call.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        level, ends = call.saving.level, call.ends
        w1, w2, *kept = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        learns1, learns2 = ctx.needs_input_grad[4:6]
        arrival = None
        if level == LEVEL1 or (learns1 and level != ACTIVATION):
            arrival = call.saving.send_again(level == LEVEL1)
        of_activated = grouped_matmul(gradient, w2.transpose(1, 2), ends)
        rows: Tensor | None = None
        if level == LEVEL1:
            assert arrival is not None
            rows, probs = arrival()
            inner = grouped_matmul(rows, w1, ends)
        else:
            inner, probs, *rest = kept
            rows = rest[0] if rest else None
        with torch.enable_grad():
            leaves = inner.detach().requires_grad_(), cast(Tensor, probs).detach().requires_grad_()
            activated = call.activated(*leaves)
        of_inner, of_probs = torch.autograd.grad(activated, leaves, of_activated)
        accumulates = call.experts.accumulates and hasattr(call.experts.weight1, "main_grad")
        if learns2:
            call.second.leave(Operands(activated.detach(), gradient, ends, w2.shape, accumulates))
        if learns1:
            again = rows if rows is not None else _rows_of(arrival)
            call.first.leave(Operands(again, of_inner, ends, w1.shape, accumulates))
        of_rows = grouped_matmul(of_inner, w1.transpose(1, 2), ends)
        tokens = [gradient.new_zeros(()) if learns else None for learns in (learns1, learns2)]
        return of_rows, of_probs, None, None, *tokens, None


def _rows_of(arrival: Arrival | None) -> Callable[[], Tensor]:
    assert arrival is not None
    return lambda: arrival()[0]
