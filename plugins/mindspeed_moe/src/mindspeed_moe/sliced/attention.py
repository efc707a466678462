"""Attention of a part of the queries, with modules of megatron-core's attention.

Keys and values are those of the whole sequence, as far as a part sees them: rows of attention do not
depend on one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer import attention as megatron_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from mindspeed_kernels.modules.core_attention import FusedCoreAttention

Heads = tuple[Tensor, Tensor, Tensor]
"""Query, key and value of the whole sequence, ``[s, b, heads, d]``."""

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def heads_of(attention: Any, hidden: Tensor, rotary: Any) -> Heads:
    """Return query, key and value, rotated.

    Args:
        attention: megatron-core's ``SelfAttention`` or ``MLASelfAttention``.
        hidden: ``[s, b, h]``, normalized; a part of the sequence where tensor-parallel ranks share it.
        rotary: angles of rotation, one tensor or one each for query and key, or None.

    Raises:
        TypeError: another attention.
    """
    if isinstance(attention, MLASelfAttention):
        query, key, value = attention.get_query_key_value_tensors(hidden, None)[:3]
        return query, key, value
    if not isinstance(attention, SelfAttention):
        raise TypeError(f"{type(attention).__qualname__} is no attention whose queries can be cut")
    query, key, value = attention.get_query_key_value_tensors(hidden)
    without = attention.config.no_rope_freq
    if rotary is None or (without and without[attention.layer_number - 1]):
        return query, key, value
    of_query, of_key = rotary if isinstance(rotary, tuple) else (rotary, rotary)
    # Looked up in the module: a fused rotation stands there.
    rotate = megatron_attention.apply_rotary_pos_emb
    scale = megatron_attention._yarn_get_concentration_factor_from_config(attention.config)
    given = {"config": attention.config, "mscale": scale, "cp_group": attention.pg_collection.cp}
    return rotate(query, of_query, **given), rotate(key, of_key, **given), value


def attend(attention: Any, heads: Heads, mask: Tensor | None, parts: Sequence[slice]) -> tuple[Tensor, Any]:
    """Return the output of attention for parts of the queries, behind one another.

    Args:
        attention: see `heads_of`.
        heads: of the whole sequence.
        mask: ``[b | 1, 1, s, s]`` bool, True hides; None for what the attention's kind says.
        parts: of the queries.

    Returns:
        ``[parts, b, h]``, scattered over tensor-parallel ranks where they share the sequence, and the bias.
    """
    context = torch.cat(list(_contexts(attention, heads, mask, parts)))
    output: tuple[Tensor, Any] = attention.linear_proj(context)
    return output


def _contexts(attention: Any, heads: Heads, mask: Tensor | None, parts: Sequence[slice]) -> Iterator[Tensor]:
    query, key, value = heads
    kind, core = attention.attn_mask_type, attention.core_attention
    # Causal queries see nothing behind them; what a given mask lets them see is its own affair.
    cut = kind in _CAUSAL and mask is None
    for part in parts:
        seen = slice(0, part.stop) if cut else slice(None)
        hides = None if mask is None else mask[..., part, :]
        if cut and not isinstance(core, FusedCoreAttention):
            hides = _behind(part, query.device)
        yield core(
            query[part].contiguous(),
            key[seen].contiguous(),
            value[seen].contiguous(),
            hides,
            attn_mask_type=kind,
            attention_bias=None,
            packed_seq_params=None,
        )


def _behind(part: slice, device: torch.device) -> Tensor:
    """Return ``[1, 1, queries, keys]``, True where a key up to the last query is behind a query."""
    keys, queries = part.stop, part.stop - part.start
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return every.triu(keys - queries + 1)[None, None]
