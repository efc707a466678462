"""Tokens in places of experts and back, ``[T, h]`` to ``[E C, h]``, by tables of indices.

Each direction is a gather forward and a gather backward: no one-hot product, whose cost grows with the square
of the number of tokens, and no addition at an index, whose order a device may change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Places:
    """Positions of tokens' choices in the ``[E C]`` places of experts.

    Attributes:
        experts: int64 ``[T, k]``, of each choice; any where there is none.
        taken: bool ``[T, k]``, choices that have a place.
        slots: int64 ``[T, k]``, their places; 0 where there is none.
        choices: int64 ``[E C]``, ``t k + j`` of the choice in a place; 0 in an empty one.
        filled: bool ``[E C]``, places that have a choice.
    """

    experts: Tensor
    taken: Tensor
    slots: Tensor
    choices: Tensor
    filled: Tensor


def places_of(routing_map: Tensor, capacity: int, choices: int) -> Places:
    """Return the places of choices, tokens of an expert in their order.

    Args:
        routing_map: bool ``[T, E]``, at most ``choices`` of a token and ``capacity`` of an expert.
        capacity: places of an expert.
        choices: most experts of a token.
    """
    tokens, experts = routing_map.shape
    device = routing_map.device
    numbers = torch.arange(experts, device=device).expand(tokens, experts)
    # What has no place goes to one column, or slot, more, which is cut off.
    column = torch.where(routing_map, routing_map.cumsum(1) - 1, choices)
    chosen = torch.full((tokens, choices + 1), experts, device=device).scatter_(1, column, numbers)
    chosen = chosen[:, :choices]
    taken = chosen < experts
    chosen = chosen.where(taken, 0)
    rank = (routing_map.cumsum(0) - 1).gather(1, chosen)
    taken &= rank < capacity
    slots = chosen * capacity + rank
    total = experts * capacity
    nowhere = tokens * choices
    table = torch.full((total + 1,), nowhere, device=device)
    table.scatter_(0, slots.where(taken, total).view(-1), torch.arange(nowhere, device=device))
    table = table[:total]
    filled = table < nowhere
    return Places(chosen, taken, slots.where(taken, 0), table.where(filled, 0), filled)


def to_places(tokens: Tensor, places: Places) -> Tensor:
    """Return ``[E C, h]`` of ``[T, h]``: the token of each place, zeros in empty ones."""
    result: Tensor = _ToPlaces.apply(tokens, places)
    return result


def from_places(rows: Tensor, weights: Tensor, places: Places) -> Tensor:
    """Return ``[T, h]``, for each token the weighted sum of the rows in its places.

    Args:
        rows: ``[E C, h]``.
        weights: ``[T, k]``; those of choices without a place do not count.
        places: of the tokens.
    """
    result: Tensor = _FromPlaces.apply(rows, weights, places)
    return result


def _gathered(tokens: Tensor, places: Places) -> Tensor:
    rows = tokens.index_select(0, places.choices // places.slots.shape[1])
    return rows.masked_fill_(~places.filled.unsqueeze(1), 0)


class _ToPlaces(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return _gathered(tokens, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        places: Places = ctx.places
        parts = [
            gradients[0].index_select(0, places.slots[:, j]).masked_fill_(~places.taken[:, j, None], 0)
            for j in range(places.slots.shape[1])
        ]
        return sum(parts[1:], parts[0]), None


class _FromPlaces(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Places) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.places = places
        weights = weights * places.taken
        # In the wider type of both: rows may be bfloat16, weights are what the router decided in.
        parts = [
            rows.index_select(0, places.slots[:, j]) * weights[:, j, None] for j in range(weights.shape[1])
        ]
        return sum(parts[1:], parts[0]).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        places: Places = ctx.places
        gradient = gradients[0]
        of_place = weights.reshape(-1).index_select(0, places.choices) * places.filled
        to_rows = _gathered(gradient, places) * of_place.unsqueeze(1)
        wide = torch.promote_types(rows.dtype, weights.dtype)
        to_weights = [
            (rows.index_select(0, places.slots[:, j]).to(wide) * gradient).sum(-1)
            for j in range(weights.shape[1])
        ]
        return to_rows.to(rows.dtype), (torch.stack(to_weights, 1) * places.taken).to(weights.dtype), None
