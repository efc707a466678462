"""Weights that linears save for backward, where hooks on saved tensors are active.

autograd then hands backward another tensor than the parameter that was saved. megatron-core's linears that
add a weight's gradient to ``main_grad`` in place note that on the saved weight, and return a gradient that
nobody reads only where the weight can take the note. Data parallelism that overlaps reductions needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
)
from torch import Tensor

if TYPE_CHECKING:
    from mindspeed_core.session import Session

_PLAIN = (ColumnParallelLinear._forward_impl, RowParallelLinear._forward_impl)


class _Saved:
    """The context of a call, with the parameter in the place of its saved copy."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor]:
        input_, _ = self._ctx.saved_tensors
        return input_, self._ctx.parameter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _WithItsParameter(LinearWithGradAccumulationAndAsyncCommunication):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Tensor, *others: Any) -> Tensor:
        ctx.parameter = weight
        output: Tensor = LinearWithGradAccumulationAndAsyncCommunication.forward(ctx, input_, weight, *others)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found: tuple[Any, ...] = LinearWithGradAccumulationAndAsyncCommunication.backward(
            _Saved(ctx), *gradients
        )
        return found


def keep_saved_weights(session: Session, owner: str, chunks: Sequence[Any]) -> None:
    """Let linears that add gradients in place know their own weight in backward.

    Call it after the model was built, when hooks on saved tensors may be active in forward passes. Linears
    whose product is somebody else's are left as they are.

    Args:
        session: takes the change back when it closes.
        owner: the feature with the hooks.
        chunks: the model chunks of this rank, wrapped or not.
    """
    for chunk in chunks:
        for linear in chunk.modules():
            plain = getattr(type(linear), "_forward_impl", None) in _PLAIN and "_forward_impl" not in vars(
                linear
            )
            if plain and linear.gradient_accumulation_fusion:
                session.instances.set(owner, linear, "_forward_impl", _forward_of(linear))


def _forward_of(linear: Any) -> Any:
    plain = linear._forward_impl

    def forward(input: Tensor, weight: Tensor, **named: Any) -> Tensor:
        if not weight.requires_grad:
            frozen: Tensor = plain(input, weight, **named)
            return frozen
        output: Tensor = _WithItsParameter.apply(
            input,
            weight,
            named.get("bias"),
            named["gradient_accumulation_fusion"],
            named["allreduce_dgrad"],
            named["sequence_parallel"],
            named.get("grad_output_buffer"),
            named.get("wgrad_deferral_limit", 0),
            named.get("tp_group"),
            # The layers of newer versions say over how many ranks a weight is spread.
            *([named["gtp_remat_size"]] if "gtp_remat_size" in named else []),
        )
        return output

    return forward
