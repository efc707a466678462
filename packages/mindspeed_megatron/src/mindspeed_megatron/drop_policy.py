"""Drops by position (``--moe-token-drop-policy position``): experts with a capacity keep the first tokens.

megatron-core takes the largest of equal numbers there, and which of them that are depends on the sort.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.moe_utils import get_capacity
from torch import Tensor

from mindspeed_core.feature import Patch

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from mindspeed_core.session import Session

Drop = Callable[..., tuple[Tensor, Tensor]]

_DROP = Patch(
    target="megatron.core.transformer.moe.moe_utils:apply_router_token_dropping",
    new="mindspeed_megatron.drop_policy:keeping_the_first",
    kind="wrap",
    reason="the first tokens of an expert are found by a sort that is not stable",
)


@dataclass
class _Applied:
    """Record that a session drops tokens by position."""

    done: bool = False


def settle_drop_policy(session: Session, config: TransformerConfig) -> None:
    """Let experts keep the first tokens in this session, where a model drops by position."""
    applied = session.state(_Applied)
    drops = getattr(config, "moe_expert_capacity_factor", None) is not None
    if drops and config.moe_token_drop_policy == "position" and not applied.done:
        session.ledger.apply([_DROP], owner="drops by position")
        applied.done = True
        session.at_close(lambda: setattr(applied, "done", False))


def keeping_the_first(original: Drop) -> Drop:
    """Return ``apply_router_token_dropping`` with another answer for the policy ``position``."""

    def drop(
        routing_probs: Tensor,
        routing_map: Tensor,
        router_topk: int,
        capacity_factor: float,
        drop_policy: str = "probs",
        pad_to_capacity: bool = False,
        **further: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return probabilities and map ``[tokens, experts]`` of what is not dropped, or fills experts up."""
        tokens, experts = routing_map.shape
        places = get_capacity(
            num_tokens=tokens * router_topk, num_experts=experts, capacity_factor=capacity_factor
        )
        if drop_policy != "position" or places > tokens:
            return original(
                routing_probs,
                routing_map,
                router_topk,
                capacity_factor,
                drop_policy,
                pad_to_capacity,
                **further,
            )
        places_taken = routing_map.int().argsort(dim=0, descending=True, stable=True)[:places]
        kept = torch.zeros_like(routing_map, dtype=torch.bool).scatter(0, places_taken, True)
        if not pad_to_capacity:
            kept = kept & routing_map
        return routing_probs * kept, kept

    return drop
