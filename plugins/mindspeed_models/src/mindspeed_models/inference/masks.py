"""Test of a model's attention: does it hide the keys that a mask names?"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from mindspeed_core.errors import UserError

_KEYS = 3


def honours_masks(chunk: torch.nn.Module) -> bool:
    """Return whether every core attention of a chunk gives the same whatever a hidden key holds.

    Attention with a window makes its own mask and reads no other. A chunk without attention takes any.
    """
    kinds: dict[Any, Attention] = {}
    for module in chunk.modules():
        if isinstance(module, Attention):
            softmax = getattr(module.core_attention, "scale_mask_softmax", None)
            window = getattr(module.core_attention, "window", getattr(softmax, "window_size", None))
            kinds.setdefault((type(module.core_attention), type(softmax), str(window)), module)
    return all(map(_hides, kinds.values()))


def _hides(attention: Attention) -> bool:
    found: Any = attention
    weight = next(found.parameters())
    like = {"dtype": weight.dtype, "device": weight.device}
    groups = found.num_query_groups_per_partition
    heads = found.num_attention_heads_per_partition
    if found.config.num_query_groups < found.world_size:
        # Ranks of a group have its key and value each, and divide its queries.
        heads //= found.world_size // found.config.num_query_groups
    query = torch.ones(1, 1, heads, found.key_hidden_size, **like)
    key = torch.ones(_KEYS, 1, groups, found.key_hidden_size, **like)
    value = torch.ones(_KEYS, 1, groups, found.val_hidden_size, **like)
    mask = torch.zeros(1, 1, 1, _KEYS, dtype=torch.bool, device=weight.device)
    mask[..., 0] = True

    def attend(of_first: float) -> Tensor:
        other = value.clone()
        other[0] = of_first
        context: Tensor = found.core_attention(
            query, key, other, mask, attn_mask_type=AttnMaskType.no_mask, attention_bias=None
        )
        return context

    try:
        with torch.no_grad():
            return torch.equal(attend(1.0), attend(5.0))
    except (ValueError, UserError):
        # A mask beside a window, or beside documents that are kept apart, is refused.
        return False
