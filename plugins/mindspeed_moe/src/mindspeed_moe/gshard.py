"""Gating with a capacity of experts (GShard; top-1 as in the Switch Transformer), as pure functions.

Choices keep their order: places in an expert are running counts over tokens, never a selection among equal
values, whose order no platform promises. All work is linear in the number of tokens but for one sort of
random numbers.
"""

from __future__ import annotations

from math import ceil

import torch
from torch import Tensor

LEAST = 4
"""The smallest capacity of an expert, DeepSpeed's."""


def capacity_of(tokens: int, experts: int, choices: int, factor: float) -> int:
    """Return how many tokens of a rank an expert takes.

    Args:
        tokens: of the rank.
        experts: of the layer.
        choices: of a token.
        factor: 1 for as many as there are choices, were they even.
    """
    return min(max(ceil(tokens * choices / experts * factor), LEAST), tokens)


def masks_of(choices: Tensor, experts: int) -> Tensor:
    """Return bool ``[k, T, E]``, the expert of each choice, of int64 ``[T, k]``."""
    tokens, count = choices.shape
    masks = torch.zeros(count, tokens, experts, dtype=torch.bool, device=choices.device)
    return masks.scatter_(2, choices.t().unsqueeze(2), True)


def kept_choices(masks: Tensor, capacity: int, order: Tensor | None = None) -> Tensor:
    """Return the choices that find a place in their expert.

    First choices come before second ones, and among them tokens in their order.

    Args:
        masks: bool ``[k, T, E]``.
        capacity: places of an expert.
        order: int64 ``[T]``, tokens in another order in which they take places.

    Returns:
        bool ``[T, E]``.
    """
    if order is not None:
        masks = masks[:, order]
    before = torch.zeros_like(masks[0, 0], dtype=torch.int64)
    kept = torch.zeros_like(masks[0])
    for mask in masks:
        places = mask.cumsum(0) - 1 + before
        kept |= mask & (places < capacity)
        before = before + mask.sum(0)
    if order is None:
        return kept
    return torch.empty_like(kept).index_copy_(0, order, kept)


def weights_of(scores: Tensor, kept: Tensor, choices: int) -> Tensor:
    """Return ``[T, E]``, the weights of experts' results: scores, of two choices divided by their sum.

    Args:
        scores: ``[T, E]``, normalized over all experts.
        kept: bool ``[T, E]``; a choice that is dropped counts in no sum.
        choices: of a token.
    """
    weights = scores * kept
    if choices == 1:
        return weights
    return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).eps)
