"""Keys that are cached with their rotary positions, so that a step rotates one token and not all before it.

megatron-core's static context caches keys as they are projected, and rotates every cached one again in each
step. A key's position never changes: it is rotated here before it is cached.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer import attention

from mindspeed_models.inference.instance_methods import methods_replaced

_METHOD = "_adjust_key_value_for_inference"


def rotated_keys(chunk: torch.nn.Module) -> AbstractContextManager[None]:
    """Let the attention layers of a chunk cache rotated keys until the block ends.

    Layers with a method of their own (multi-latent attention rotates before it caches) stay as they are.
    """
    return methods_replaced(chunk, _METHOD, _function_of)


def _function_of(module: Any) -> Callable[..., Any] | None:
    own = getattr(type(module), _METHOD, None)
    return _adjust if own is getattr(attention.Attention, _METHOD) else None


def _adjust(
    module: Any,
    context: Any,
    query: Any,
    key: Any,
    value: Any,
    rotary_pos_emb: Any,
    *given: Any,
    **named: Any,
) -> Any:
    """Rotate keys ``[s, b, g, d]`` before megatron-core's method caches them; leave queries to the layer."""
    plain = partial(getattr(attention.Attention, _METHOD), module, context)
    rotates = context is not None and rotary_pos_emb is not None and rotary_pos_emb[1] is not None
    if not rotates or not context.is_static_batching() or module.config.flash_decode:
        return plain(query, key, value, rotary_pos_emb, *given, **named)
    start = context.sequence_len_offset
    # By the module's name: features replace the function there.
    key = attention.apply_rotary_pos_emb(
        key,
        rotary_pos_emb[1][start : start + len(key)],
        config=module.config,
        cu_seqlens=None,
        mscale=attention._yarn_get_concentration_factor_from_config(module.config),
        cp_group=module.pg_collection.cp,
    )
    query, key, value, rotary_pos_emb, *rest = plain(query, key, value, rotary_pos_emb, *given, **named)
    return query, key, value, (rotary_pos_emb[0], None), *rest
