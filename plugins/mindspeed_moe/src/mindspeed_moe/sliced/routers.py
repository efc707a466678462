"""Routers of tokens that arrive slice by slice: routes for each slice, losses for all of them."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.autograd import Function

from mindspeed_moe.gshard_router import GShardRouter
from mindspeed_moe.routers import DeviceBalancedRouter


class SlicedRouting(TopKRouter):
    """Common part of sliced routers.

    Losses of balance depend on all tokens of a rank, and so do counts; routes of a token depend on no other
    one. So each slice is routed without losses, and all logits once more with them.
    """

    training: bool
    _logits: list[Tensor] | None = None

    def forward(
        self,
        input: Tensor,
        padding_mask: Tensor | None = None,
        logits: list[Tensor] | None = None,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Route tokens.

        Args:
            input: ``[s, b, h]`` of a slice; all tokens without ``logits``; not read in the last call.
            padding_mask: bool ``[s, b]``, True for tokens that do not count for losses.
            logits: of the slices until now; those of this one are added.
            last: every slice has been routed; compute what all of them decide.

        Returns:
            Probabilities and map ``[tokens, experts]``; of the last call the probabilities of all tokens,
            which carry the losses, and an empty map.
        """
        masked = () if padding_mask is None else (padding_mask,)
        routed: tuple[Tensor, Tensor]
        if logits is None:
            routed = super().forward(input, *masked)
            return routed
        if last:
            probs, routing_map = self.routing(torch.cat(logits), *masked)
            return probs, routing_map[:0]
        counts = self.local_tokens_per_expert
        before = None if counts is None else counts.clone()
        training = self.training
        self.training, self._logits = False, logits
        try:
            routed = super().forward(input)
        finally:
            self.training, self._logits = training, None
        if before is not None:
            # The last call counts.
            counts.copy_(before)
        return routed

    def gating(self, input: Tensor) -> Tensor:
        """Return logits ``[s, b, experts]`` of ``[s, b, h]``, and remember those of a slice."""
        logits: Tensor = super().gating(input)
        if self._logits is not None:
            self._logits.append(logits)
        return logits


class SlicedTopKRouter(SlicedRouting):
    """megatron-core's router."""


class SlicedDeviceBalancedRouter(SlicedRouting, DeviceBalancedRouter):
    """A router with losses of balance between devices."""


class SlicedGShardRouter(SlicedRouting, GShardRouter):
    """A router of DeepSpeed's gate, without drops."""


class _Carry(Function):
    @staticmethod
    def forward(ctx: Any, result: Tensor, carrier: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = carrier.shape, carrier.dtype
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], gradients[0].new_zeros(ctx.shape, dtype=ctx.dtype)


def carrying(result: Tensor, carrier: Tensor) -> Tensor:
    """Return the result; backward also reaches the carrier, with zeros, and the losses attached to it."""
    carried: Tensor = _Carry.apply(result, carrier)
    return carried
