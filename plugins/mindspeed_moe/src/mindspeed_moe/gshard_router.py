"""The router of ``--moe-model-type deepspeed_moe``: one or two choices, experts with a capacity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe.moe_utils import sinkhorn
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from mindspeed_moe.gshard import capacity_of, kept_choices, masks_of, weights_of
from mindspeed_moe.options import JITTER, RESAMPLE

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from mindspeed_moe.options import GShard

SPREAD = 1e-2
"""Inputs of the router are multiplied by numbers between 1 - this and 1 + this."""


class GShardRouter(TopKRouter):
    """Sends tokens to their first choices, then to their second ones, as long as experts have places.

    What is random comes from megatron-core's tracker of random numbers, which differs between tensor-parallel
    ranks, stands in checkpoints, and is put back where a layer is computed again.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        gshard: GShard,
        **further: Any,
    ) -> None:
        """Build megatron-core's router.

        Args:
            config: of the model.
            pg_collection: the groups.
            gshard: capacity and random choices.
            further: what newer versions of megatron-core hand to their router.
        """
        super().__init__(config=config, pg_collection=pg_collection, **further)
        self._gshard = gshard

    def apply_input_jitter(self, input: Tensor) -> Tensor:
        """Return ``[s, b, h]``, in training multiplied by random numbers near 1 where that was asked for."""
        if self._gshard.noise != JITTER or not self.training:
            return input
        with get_cuda_rng_tracker().fork():
            factors = torch.empty_like(input).uniform_(1 - SPREAD, 1 + SPREAD)
        return input * factors

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and map ``[tokens, experts]`` of ``[s, b, experts]``.

        Args:
            logits: ``[s, b, experts]``.
            padding_mask: bool ``[s, b]``, True for tokens that do not count for losses.
        """
        logits = logits.view(-1, logits.shape[-1])
        if padding_mask is not None:
            padding_mask = padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits, padding_mask=padding_mask)
        scores = torch.softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        masks = masks_of(self._choices(logits.detach()), logits.shape[-1])
        kept = self._kept(masks)
        weights = weights_of(scores, kept, self.topk).type_as(logits)
        if self.training and torch.is_grad_enabled():
            weights = self._with_balance(weights, scores, masks[0], padding_mask)
        return weights, kept

    def _choices(self, logits: Tensor) -> Tensor:
        """Return int64 ``[T, k]``, the experts of each token, the first choice first."""
        # Inputs of a narrow type would be the same for many experts.
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.training and self._gshard.sinkhorn:
            logits = sinkhorn(logits)
        if self.training and self._gshard.noise == RESAMPLE:
            with get_cuda_rng_tracker().fork():
                exponential = torch.empty_like(logits).exponential_()
            logits = logits - exponential.log()
        return logits.topk(self.topk, dim=-1).indices

    def _kept(self, masks: Tensor) -> Tensor:
        """Return bool ``[T, E]``, choices that are not dropped."""
        factor, tokens = self._gshard.factor, masks.shape[1]
        if factor is None:
            return masks.any(0)
        order = None
        if self.training and self._gshard.random_tokens and self.topk == 1:
            with get_cuda_rng_tracker().fork():
                numbers = torch.rand(tokens, device=masks.device)
            order = torch.argsort(numbers, stable=True)
        capacity = capacity_of(tokens, masks.shape[2], self.topk, factor)
        return kept_choices(masks, capacity, order)

    def _with_balance(
        self, weights: Tensor, scores: Tensor, first: Tensor, padding_mask: Tensor | None
    ) -> Tensor:
        """Return the weights, which carry the gradient of the balance of first choices."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return weights
        tokens, experts = scores.shape
        valid: int | Tensor = tokens
        if padding_mask is not None:
            counts = ~padding_mask
            scores, first, valid = scores * counts[:, None], first & counts[:, None], counts.sum()
        totals = torch.cat([first.sum(0), torch.as_tensor(valid, device=first.device).view(1)])
        # The sequence may be split over ranks; each adds its tokens' share of the loss.
        if self.tp_cp_group.size() > 1:
            dist.all_reduce(totals, group=self.tp_cp_group)
        everywhere = totals[-1].clamp_min(1).to(scores.dtype)
        loss = experts * coefficient * (scores.sum(0) * totals[:-1]).sum() / everywhere.square()
        attached: Tensor = self.attach_and_log_load_balancing_loss(
            weights,
            coefficient,
            loss,
            "load_balancing_loss",
            self.tp_cp_group,
            valid_token_count=valid,
        )
        return attached
