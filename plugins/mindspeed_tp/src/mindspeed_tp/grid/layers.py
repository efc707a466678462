"""Attention and layers on the grid: positions, dropout, the first layer's input, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from mindspeed_tp.described_layer import DescribesItsLinears
from mindspeed_tp.grid.place import here
from mindspeed_tp.grid.spread import SpreadHidden, heads_for_positions, positions_for_heads


class CoreAttention2D(torch.nn.Module):
    """Whatever attention is specified, between exchanges of heads for positions over y."""

    def __init__(self, *, inner: Any, groups: Callable[[], Any], **named: Any) -> None:
        """Build it.

        Args:
            inner: specification of the attention.
            groups: returns the model's process groups; each rank computes its share of all heads.
            named: of the attention.
        """
        super().__init__()
        named["pg_collection"] = groups()
        self.inner = build_module(inner, **named)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **named: Any) -> Tensor:
        """Attend from ``[s / y, b, n / x, d]``, to ``[s / y, b, n d / x]``."""
        group = here().y
        query, key, value = (heads_for_positions(part, group) for part in (query, key, value))
        found = self.inner(query, key, value, *args, **named)
        s, b, width = found.shape
        heads = query.shape[2]
        back = positions_for_heads(found.reshape(s, b, heads, width // heads), group)
        return back.reshape(back.shape[0], b, -1)


@cache
def attention_2d(attention: type) -> type:
    """Return a subclass of an attention module whose heads are spread over x, and positions over y."""

    class Attention2D(attention):
        def __init__(self, *args: Any, pg_collection: Any, **named: Any) -> None:
            groups = copy.copy(pg_collection)
            groups.tp = here().x
            super().__init__(*args, pg_collection=groups, **named)
            # Its norms of heads are the same on all ranks.
            self.tp_group = pg_collection.tp

        def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Any = None, **named: Any) -> Any:
            return super().forward(hidden_states, *args, rotary_pos_emb=_own(rotary_pos_emb), **named)

    Attention2D.__name__ = Attention2D.__qualname__ = f"{attention.__name__}2D"
    return Attention2D


def _own(angles: Any) -> Any:
    """Return the part of rotary angles ``[s, ...]`` that belongs to this rank's positions."""
    if angles is None:
        return None
    if isinstance(angles, tuple):
        return tuple(_own(part) for part in angles)
    y = here().y
    return angles.chunk(y.size(), 0)[y.rank()]


def drawn_apart(training: bool, fused: bool) -> Callable[..., Tensor]:
    """Return megatron-core's ``get_bias_dropout_add`` with a dropout of this rank's own rows."""
    add = get_bias_dropout_add(training, fused)

    def with_own_draws(output: Any, residual: Tensor, share: float) -> Tensor:
        if not training or share == 0.0:
            return add(output, residual, share)
        with get_cuda_rng_tracker().fork():
            return add(output, residual, share)

    return with_own_draws


class _Layer2D(DescribesItsLinears):
    """Mixin of a transformer layer on the grid."""

    layer_number: int

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the layer; the first one takes the hidden state that the embedding leaves on every rank."""
        if self.layer_number == 1:
            if "hidden_states" in named:
                named["hidden_states"] = SpreadHidden.apply(named["hidden_states"], here())
            else:
                args = (SpreadHidden.apply(args[0], here()), *args[1:])
        return super().forward(*args, **named)  # type: ignore[misc]


@cache
def layer_2d(layer: type) -> type:
    """Return a subclass of a transformer layer that works on the grid."""
    return type(f"{layer.__name__}2D", (_Layer2D, layer), {})
