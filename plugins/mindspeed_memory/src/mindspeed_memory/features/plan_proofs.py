"""Proofs of plans: a model trains as without, fully sharded too."""

from __future__ import annotations

from mindspeed_core.feature import Gain
from mindspeed_memory.features.proofs import EXPERTS, FUSED_LLAMA, as_without, fully_sharded, in_layouts

_LAYERS = ("--recompute-plan", "decoder.layers.{*}")
_PARTS = ("--recompute-plan", "decoder.layers.{0-1}.mlp", "decoder.layers.{2,3}.self_attention")
_SWAPPED = ("--swap-activation-plan", "decoder.layers.{0-2}", "--swap-min-bytes", "1024")
_TOKENS, _WIDTH, _FLOAT = 32, 256, 4

RECOMPUTE_PROOFS = (
    # Biases are among the results of these modules. Two of four layers drop product and activation.
    as_without(
        "feed-forward",
        ("--recompute-plan", "decoder.layers.{0-1}.mlp"),
        gains=(Gain("forward_bytes", less=2 * 2 * _TOKENS * _WIDTH * _FLOAT),),
    ),
    as_without("layers", _LAYERS, model=FUSED_LLAMA, gains=(Gain("forward_bytes", 0.5),)),
    *in_layouts(_PARTS),
    as_without("experts", _LAYERS, model=EXPERTS),
    *fully_sharded(_LAYERS),
)
SWAP_PROOFS = (
    as_without(
        "layers",
        _SWAPPED,
        model=FUSED_LLAMA,
        gains=(Gain("forward_bytes", 0.7), Gain("host_buffers", less=0)),
    ),
    *in_layouts(_SWAPPED),
    as_without("with-recomputed-parts", (*_SWAPPED, *_PARTS), model=FUSED_LLAMA, baseline=()),
    *fully_sharded(_SWAPPED, model=FUSED_LLAMA),
)
