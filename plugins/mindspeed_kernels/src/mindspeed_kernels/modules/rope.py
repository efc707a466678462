"""Fused rotary position embedding in place of megatron-core's function.

Cosine and sine are computed once for a tensor of angles and kept with it: megatron-core hands the same tensor
to queries and keys of every layer. Packed sequences get the angles of their own positions.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mindspeed_kernels.ops import npu_rotary_position_embedding

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_KEPT = "_mindspeed_rotation"


def with_fused_rotation(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap megatron-core's ``apply_rotary_pos_emb``: rotate with the fused operator.

    Args:
        original: what it was; still serves when TransformerEngine's fusion was asked for, and packed
            sequences that are split over context-parallel ranks.
    """

    taken = signature(original).parameters.get("mla_rotary_interleaved")
    caller_says = taken is not None
    usual = taken.default if taken is not None else None

    def apply_rotary_pos_emb(
        t: Tensor,
        freqs: Tensor,
        config: Any,
        cu_seqlens: Tensor | None = None,
        mscale: float = 1.0,
        cp_group: ProcessGroup | None = None,
        mla_rotary_interleaved: bool | None = usual,
    ) -> Tensor:
        """Rotate ``[s, b, n, d]``, or ``[t, n, d]`` with ``cu_seqlens``, by angles ``[s, 1, 1, r]``.

        Of megatron-core before 0.19 the configuration says whether ``t`` holds pairs; later the caller does.
        """
        pairs = config.multi_latent_attention if mla_rotary_interleaved is None else mla_rotary_interleaved
        split = cu_seqlens is not None and cp_group is not None and cp_group.size() > 1
        if config.apply_rope_fusion or split:
            asked = {"mla_rotary_interleaved": pairs} if caller_says else {}
            return original(t, freqs, config, cu_seqlens, mscale, cp_group, **asked)
        if cu_seqlens is None:
            return rotated(t, *rotation(freqs, mscale), config, pairs)
        tables = packed_rotation(freqs, mscale, cu_seqlens, t.shape[0])
        return rotated(t.unsqueeze(1), *tables, config, pairs).squeeze(1)

    return apply_rotary_pos_emb


def rotation(freqs: Tensor, mscale: float) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of angles, times ``mscale``; they are computed once for a tensor."""
    if torch.compiler.is_compiling():
        # A graph keeps nothing with a tensor; the compiler computes equal expressions once.
        return freqs.cos() * mscale, freqs.sin() * mscale
    kept = getattr(freqs, _KEPT, None)
    if kept is None or kept[0] != (freqs._version, mscale):
        kept = ((freqs._version, mscale), freqs.cos() * mscale, freqs.sin() * mscale)
        setattr(freqs, _KEPT, kept)
    return kept[1], kept[2]


def packed_rotation(freqs: Tensor, mscale: float, cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Return cosine and sine ``[t, 1, 1, r]`` of packed sequences, each of which starts at position 0.

    Angles for every token of the batch (as many as tokens) are taken as they are.
    """
    if freqs.shape[0] == tokens:
        return rotation(freqs, mscale)
    if torch.compiler.is_compiling():
        return _gathered(freqs, mscale, cu_seqlens, tokens)
    kept = getattr(cu_seqlens, _KEPT, None)
    if kept is None or kept[0] is not freqs or kept[1] != (freqs._version, mscale, tokens):
        tables = _gathered(freqs, mscale, cu_seqlens, tokens)
        kept = (freqs, (freqs._version, mscale, tokens), *tables)
        setattr(cu_seqlens, _KEPT, kept)
    return kept[2], kept[3]


def _gathered(freqs: Tensor, mscale: float, cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    token = torch.arange(tokens, device=freqs.device)
    sequence = torch.searchsorted(cu_seqlens[1:].to(freqs.device).contiguous(), token, right=True)
    position = token - cu_seqlens.to(freqs.device)[sequence]
    cos, sin = rotation(freqs, mscale)
    return cos[position], sin[position]


def rotated(t: Tensor, cos: Tensor, sin: Tensor, config: Any, pairs: bool) -> Tensor:
    """Rotate as many of the first dimensions of ``[s, b, n, d]`` as there are angles; pass the others on.

    ``pairs``: neighbours belong together in ``t``, as in checkpoints of multi-latent attention.
    """
    width = cos.shape[-1]
    turned, passed = t[..., :width], t[..., width:]
    if pairs:
        # The rotation is that of halves.
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    turned = npu_rotary_position_embedding(turned, cos, sin, 1 if config.rotary_interleaved else 0)
    return turned if not passed.shape[-1] else torch.cat((turned, passed), dim=-1)
