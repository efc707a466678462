"""megatron-core's router, with balance between devices or with fixed routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_megatron.expert_losses import expert_loss_weight
from mindspeed_moe.options import DeviceLosses

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mindspeed_moe.options import DeviceLosses


def device_losses(
    scores: Tensor,
    routing_map: Tensor,
    valid: Tensor | None,
    options: DeviceLosses,
    total: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return this rank's share of the losses of balance between devices (DeepSeek-V2, 2.1.2).

    With ``n_d`` choices of experts of device ``d`` among ``T`` tokens of ``k`` choices each, ``m_d`` tokens
    that choose any of them, and ``P_d`` the mean over tokens of the scores of these experts, they are
    ``D Σ n_d / (k T) P_d`` and, of what is sent, ``D Σ m_d / (M T) P_d``, where ``M`` is the number of
    devices that a token may go to. Both are 1 where everything is even. Only the scores have a gradient.

    Args:
        scores: ``[T, E]``, normalized scores of this rank's tokens.
        routing_map: bool ``[T, E]``, the experts they go to.
        valid: bool ``[T]``, False for tokens that do not count; None where all do.
        options: coefficients, ``D``, ``k`` and ``M``.
        total: sums numbers over the ranks that share a sequence.

    Returns:
        A scalar, in float32 at least; its sum over the ranks that share a sequence is the loss.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if valid is not None:
        routing_map, scores = routing_map & valid.unsqueeze(1), scores * valid.unsqueeze(1)
    tokens = routing_map.shape[0] if valid is None else valid.sum()
    by_device = routing_map.unflatten(1, (options.devices, -1))
    counts = torch.cat(
        [
            by_device.sum((0, 2)),
            by_device.any(2).sum(0),
            torch.as_tensor(tokens, device=scores.device).view(1),
        ]
    )
    chosen, sent, everywhere = total(counts.to(scores.dtype)).split([options.devices, options.devices, 1])
    load = options.balance / options.choices * chosen + options.communication / options.reached * sent
    score = scores.unflatten(1, (options.devices, -1)).sum((0, 2))
    return options.devices * (load * score).sum() / everywhere.clamp_min(1).square().squeeze(0)


class DeviceBalancedRouter(TopKRouter):
    """Adds the gradients of losses of balance between devices."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        losses: DeviceLosses,
        **further: Any,
    ) -> None:
        """Build megatron-core's router.

        Args:
            config: of the model.
            pg_collection: the groups.
            losses: coefficients and devices.
            further: what newer versions of megatron-core hand to their router.
        """
        super().__init__(config=config, pg_collection=pg_collection, **further)
        self._losses = losses

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and map ``[tokens, experts]`` of ``[s, b, experts]``.

        Args:
            logits: ``[s, b, experts]``.
            padding_mask: bool ``[s, b]``, True for tokens that do not count.
        """
        probs, routing_map = super().routing(logits, padding_mask=padding_mask)
        # Nothing in the first forward of a layer that is recomputed.
        if not (self.training and torch.is_grad_enabled()):
            return probs, routing_map
        _, scores = compute_routing_scores_for_aux_loss(
            logits.view(-1, logits.shape[-1]), self.topk, self.score_function
        )
        valid = None if padding_mask is None else ~padding_mask.reshape(-1)
        loss = device_losses(scores, routing_map, valid, self._losses, self._total)
        loss = loss * expert_loss_weight(self, routing_map.shape[0])
        return MoEAuxLossAutoScaler.apply(probs, loss), routing_map

    def _total(self, counts: Tensor) -> Tensor:
        """Return the sums over the ranks that share a sequence."""
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=self.tp_cp_group)
        return counts


class FixedRouter(TopKRouter):
    """Sends tokens to experts in turn, whatever their scores; probabilities are those of the scores."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return probabilities and map ``[tokens, experts]`` of ``[s, b, experts]``.

        Args:
            logits: ``[s, b, experts]``.
            padding_mask: bool ``[s, b]``, True for tokens that do not count for balance losses.
        """
        # For the losses on logits and probabilities, whose gradients go with the sum of no entry.
        chosen, _ = super().routing(logits, padding_mask=padding_mask)
        flat = logits.view(-1, logits.shape[-1])
        experts = self._in_turn(flat.shape[0], flat.shape[1], flat.device)
        probs = torch.zeros_like(flat).scatter(1, experts, self._probabilities(flat, experts))
        routing_map = torch.zeros_like(flat, dtype=torch.bool).scatter(1, experts, True)
        return probs + 0 * chosen, routing_map

    def _in_turn(self, tokens: int, experts: int, device: torch.device) -> Tensor:
        """Return int64 ``[tokens, k]``; ranks go on where the one before stops."""
        choices = tokens * self.topk
        first = self.tp_dp_cp_group.rank() * choices
        in_turn = torch.arange(first, first + choices, device=device) % experts
        return in_turn.view(tokens, self.topk)

    def _probabilities(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Return what megatron-core's scoring gives for these experts, ``[tokens, k]``."""
        if self.score_function == "sigmoid":
            scores = torch.sigmoid(logits.float()).type_as(logits).gather(1, experts)
            probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if self.topk > 1 else scores
        elif self.config.moe_router_pre_softmax:
            probs = torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits).gather(1, experts)
        else:
            probs = torch.softmax(logits.gather(1, experts), dim=-1, dtype=torch.float32).type_as(logits)
        return probs * (self.config.moe_router_topk_scaling_factor or 1.0)
