"""Proofs of swapped tensors: a model trains as without, and as many bytes as formulas say wait on the host.

The last layer of the model is never swapped.
"""

from __future__ import annotations

from mindspeed_core.feature import Gain
from mindspeed_memory.features.proofs import (
    BLOCK,
    EXPERTS,
    FUSED_LLAMA,
    PP2,
    as_without,
    fully_sharded,
    in_layouts,
)

_TOKENS, _HIDDEN, _FLOAT = 32, 64, 4
_KEY_VALUE = 32
_SMALL = ("--swap-min-bytes", "1024")
_ATTENTION = ("--swap-attention", *_SMALL)
_SELF_ATTENTION = (*_ATTENTION, "--swap-modules", "self_attention")
_INPUT = ("--swap-layer-input", *_SMALL)
_UNIFORM = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers")
_FLASH = ("--use-flash-attn",)
# A host makes some itself, for what it reports.
_NEW = Gain("host_buffers", less=0)
_FOUR_MICRO_BATCHES = 4


def _swapped(layers: int, per_layer: int) -> tuple[Gain, ...]:
    """Bytes that leave the device in the forward pass, those that go to the host in a step, no new buffer.

    How many they are follows from what attention saves, which is another kernel's on another device.
    """
    return (
        Gain("forward_bytes", less=layers * per_layer, platforms=("cpu",)),
        Gain("forward_bytes", 0.9),
        Gain("swapped bytes", exactly=_FOUR_MICRO_BATCHES * layers * per_layer, platforms=("cpu",)),
        Gain("host_bytes", exactly=layers * per_layer, platforms=("cpu",)),
        _NEW,
    )


# The norm's result, query, key and value as one tensor, both rotated, and the output.
_ATTENTION_BYTES = (
    _TOKENS * _FLOAT * (_HIDDEN + (_HIDDEN + 2 * _KEY_VALUE) + (_HIDDEN + _KEY_VALUE) + _HIDDEN)
)
_INPUT_BYTES = _TOKENS * _HIDDEN * _FLOAT
ATTENTION_PROOFS = (
    as_without(
        "self-attention",
        _SELF_ATTENTION,
        model=FUSED_LLAMA,
        gains=(*_swapped(3, _ATTENTION_BYTES), Gain("late swaps", exactly=0)),
    ),
    as_without("all-modules", _ATTENTION, model=FUSED_LLAMA, gains=(Gain("forward_bytes", 1.0), _NEW)),
    as_without(
        "models",
        ("--swap-models", "decoder,2", *_SELF_ATTENTION[1:]),
        model=FUSED_LLAMA,
        gains=_swapped(2, _ATTENTION_BYTES),
    ),
    as_without("models-pp2", ("--swap-models", "decoder,3", *_SMALL), *PP2, ranks=2, model=FUSED_LLAMA),
    as_without("depth-0", (*_ATTENTION, "--swap-prefetch-depth", "0"), model=FUSED_LLAMA, gains=(_NEW,)),
    as_without("depth-2", (*_ATTENTION, "--swap-prefetch-depth", "2"), model=FUSED_LLAMA, gains=(_NEW,)),
    as_without("recomputed-feed-forward", (*_ATTENTION, *BLOCK, "2"), model=FUSED_LLAMA, baseline=()),
    as_without("uniform", (*_ATTENTION, *_UNIFORM, "1"), model=FUSED_LLAMA, baseline=()),
    as_without(
        "with-recomputed-parts",
        (*_ATTENTION, "--recompute-norm", "--recompute-activation-function"),
        model=FUSED_LLAMA,
        baseline=(),
    ),
    *in_layouts(_ATTENTION),
    as_without("experts", _ATTENTION, *_FLASH, model=EXPERTS),
    *fully_sharded(_ATTENTION, model=FUSED_LLAMA),
)
INPUT_PROOFS = (
    as_without("block", _INPUT, *BLOCK, "4", gains=_swapped(3, _INPUT_BYTES)),
    as_without("some-layers", _INPUT, *BLOCK, "2", gains=_swapped(2, _INPUT_BYTES)),
    as_without("uniform", _INPUT, *_UNIFORM, "2", gains=_swapped(1, _INPUT_BYTES)),
    as_without("depth-2", (*_INPUT, "--swap-prefetch-depth", "2"), *BLOCK, "4"),
    *(in_layouts((*_INPUT, *BLOCK, "4"))),
    as_without("pp2-bytes", _INPUT, *PP2, *BLOCK, "2", ranks=2),
    *fully_sharded(_INPUT, *BLOCK, "4", model=FUSED_LLAMA),
)
