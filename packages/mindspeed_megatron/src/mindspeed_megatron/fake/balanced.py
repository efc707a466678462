"""Routing of tokens to experts in a dry run: evenly, or more of them to the experts of this rank.

The router chooses by numbers that do not exist. Here its map is given values, and everything that follows
from it (counts, split sizes, the length of a permutation) is what it would be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mindspeed_megatron.fake.known import known_values, set_known


def routing_of(skew: float) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a wrapper of ``TopKRouter.forward``, which gives the map of tokens to experts its values.

    Args:
        skew: tokens that each expert of this rank gets, as a multiple of the average.
    """

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(self: Any, *args: Any, **options: Any) -> Any:
            probs, routing_map = original(self, *args, **options)
            if known_values(routing_map) is None:
                set_known(routing_map, _map_of(self, routing_map, skew))
            return probs, routing_map

        return forward

    return wrap


def balanced_routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``TopKRouter.forward`` in a world that computes: tokens go where a dry run takes them to go."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **options: Any) -> Any:
        probs, routing_map = original(self, *args, **options)
        chosen = _map_of(self, routing_map, 1.0)
        with _disable_current_modes():
            # Backward has saved it: the values change, and nobody counts it as a change.
            routing_map.data.copy_(chosen)
        return probs, routing_map

    return forward


def _map_of(router: Any, routing_map: torch.Tensor, skew: float) -> torch.Tensor:
    from megatron.core import parallel_state

    tokens, experts = routing_map.shape
    config = router.config
    local = experts // config.expert_model_parallel_size
    first = local * parallel_state.get_expert_model_parallel_rank()
    factor = config.moe_expert_capacity_factor
    largest = (
        tokens
        if factor is None
        else min(tokens, -(-int(tokens * config.moe_router_topk * factor) // experts))
    )
    with _disable_current_modes():
        return balanced_map(tokens, experts, config.moe_router_topk, first, local, skew, largest)


@lru_cache(maxsize=16)
def balanced_map(
    tokens: int, experts: int, topk: int, first: int, local: int, skew: float, largest: int
) -> torch.Tensor:
    """Return a map ``[tokens, experts]`` in which each token goes to ``topk`` different experts.

    Args:
        tokens: rows.
        experts: columns.
        topk: experts of a token; fewer where experts are full.
        first: the first expert of this rank.
        local: experts of this rank.
        skew: tokens of each of them, as a multiple of the average.
        largest: tokens that an expert takes.
    """
    wanted = tokens * topk
    if skew == 1.0 or local == experts:
        counts = _shared(wanted, experts, tokens)
    else:
        own = min(round(wanted * skew * local / experts), local * tokens, wanted)
        others = wanted - own
        room = (experts - local) * tokens
        own, others = own + max(0, others - room), min(others, room)
        elsewhere = _shared(others, experts - local, tokens)
        counts = [*elsewhere[:first], *_shared(own, local, tokens), *elsewhere[first:]]
    expert = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    # An expert's tokens follow each other: none gets the same one twice, and each token goes to `topk`.
    token = torch.arange(len(expert)) % tokens
    chosen = torch.zeros(tokens, experts, dtype=torch.bool)
    chosen[token, expert] = True
    if largest < tokens:
        chosen &= chosen.long().cumsum(dim=0) <= largest
    return chosen


def _shared(amount: int, among: int, most: int) -> list[int]:
    """Share an amount evenly, as whole numbers of at most ``most``."""
    each, rest = divmod(min(amount, among * most), among)
    return [each + (index < rest) for index in range(among)]
