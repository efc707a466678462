"""Proofs of what is computed again: a model trains as without it, and keeps fewer bytes by a closed formula.

Bytes are those alive after the forward pass of the one micro-batch that is under way.
"""

from __future__ import annotations

from mindspeed_core.feature import Gain
from mindspeed_memory.features.proofs import (
    BLOCK,
    EXPERTS,
    FUSED_LLAMA,
    INTERLEAVED,
    LLAMA,
    MODEL,
    PP2,
    TP2,
    as_without,
    fully_sharded,
    in_layouts,
    resumed,
)

_LAYERS, _TOKENS, _HIDDEN, _FLOAT = 4, 32, 64, 4
_ACTIVATION = ("--recompute-activation-function",)
_NORM = ("--recompute-norm",)
_UNEVEN = (*PP2, "--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "3")


def _activations(width: int, *, kept: int = 1, layers: int = _LAYERS) -> tuple[Gain, ...]:
    return (Gain("forward_bytes", less=layers * kept * _TOKENS * width * _FLOAT),)


def _norms(statistics: int, *, layers: int = _LAYERS) -> tuple[Gain, ...]:
    """Bytes of two norms a layer: their results, and what each keeps of a token besides."""
    return (Gain("forward_bytes", less=layers * 2 * _TOKENS * (_HIDDEN * _FLOAT + statistics)),)


ACTIVATION_PROOFS = (
    as_without("gelu", _ACTIVATION, gains=_activations(256)),
    # Without a kernel the gate's activation and the product's second factor are kept beside the product.
    as_without(
        "swiglu", _ACTIVATION, "--no-bias-swiglu-fusion", model=LLAMA, gains=_activations(128, kept=3)
    ),
    as_without("fused-swiglu", _ACTIVATION, model=FUSED_LLAMA, gains=_activations(128)),
    as_without("swiglu-bias", _ACTIVATION, "--swiglu", "--add-qkv-bias"),
    as_without(
        "two-layers",
        (*_ACTIVATION, "--recompute-activation-function-num-layers", "2"),
        gains=_activations(256, layers=2),
    ),
    # The first layer is computed again as a whole, the following two in part.
    as_without(
        "behind-whole-layers",
        (*_ACTIVATION, "--recompute-activation-function-num-layers", "2"),
        *(*BLOCK, "1"),
        gains=_activations(256, layers=2),
    ),
    *in_layouts(_ACTIVATION),
    as_without("tp2-gelu", _ACTIVATION, *TP2, ranks=2),
    as_without(
        "uneven-stages",
        (*_ACTIVATION, "--recompute-activation-function-num-layers", "2"),
        *_UNEVEN,
        ranks=2,
    ),
    as_without("experts", _ACTIVATION, model=EXPERTS),
    as_without("grouped-experts", _ACTIVATION, "--moe-grouped-gemm", model=EXPERTS),
    as_without(
        "overlapped-experts",
        _ACTIVATION,
        *("--moe-grouped-gemm", "--expert-model-parallel-size", "2", "--moe-alltoall-overlap-comm"),
        ranks=2,
        model=EXPERTS,
    ),
    *fully_sharded(_ACTIVATION),
)
NORM_PROOFS = (
    # Mean and deviation of each token.
    as_without("layernorm", _NORM, gains=_norms(2 * _FLOAT)),
    # A norm made of several operations adds the gradients of its input in another order.
    as_without("plain-rmsnorm", _NORM, model=LLAMA, tolerance=5e-6),
    as_without("fused-rmsnorm", _NORM, model=FUSED_LLAMA),
    as_without("one-layer", (*_NORM, "--recompute-norm-num-layers", "1"), gains=_norms(2 * _FLOAT, layers=1)),
    as_without(
        "with-activations",
        (*_NORM, *_ACTIVATION, "--recompute-activation-function-num-layers", "2"),
        *(*BLOCK, "1"),
    ),
    *in_layouts(_NORM),
    as_without("uneven-stages", (*_NORM, "--recompute-norm-num-layers", "2"), *_UNEVEN, ranks=2),
    as_without("experts", _NORM, model=EXPERTS),
    *fully_sharded(_NORM),
)
_PER_RANK = ("--enable-recompute-layers-per-pp-rank",)
COUNT_PROOFS = (
    as_without(
        "interleaved",
        (*_PER_RANK, *BLOCK, "1"),
        *INTERLEAVED,
        ranks=2,
        baseline=INTERLEAVED,
        gains=(Gain("forward_bytes", 1.0),),
    ),
    as_without(
        "spared",
        ("--reduce-recompute-for-last-chunk", *BLOCK, "2"),
        *PP2,
        ranks=2,
        baseline=PP2,
    ),
    as_without(
        "with-parts",
        (
            *(*_PER_RANK, *BLOCK, "1", *_ACTIVATION, "--recompute-activation-function-num-layers", "1"),
            *("--recompute-norm", "--recompute-norm-num-layers", "2"),
        ),
        *INTERLEAVED,
        ranks=2,
        baseline=INTERLEAVED,
    ),
    as_without("uneven-stages", (*_PER_RANK, *BLOCK, "2"), *_UNEVEN, ranks=2, baseline=_UNEVEN),
    as_without("more-than-there-are", (*_PER_RANK, *BLOCK, "9"), baseline=()),
    *fully_sharded((*_PER_RANK, *BLOCK, "2")),
    resumed((*_PER_RANK, *BLOCK, "1"), *INTERLEAVED),
)
_DENSE = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
DENSE_PROOFS = (
    # Of each layer the first product and the activation, and with dropout nothing else.
    as_without("bias", _DENSE, model=MODEL, gains=_activations(256, kept=2)),
    as_without("swiglu-bias", _DENSE, "--swiglu"),
    as_without("tp2-sequence-parallel", _DENSE, *TP2, ranks=2),
    as_without("pp2", _DENSE, *PP2, ranks=2),
    as_without("with-norms", (*_DENSE, *_NORM)),
    *fully_sharded(_DENSE),
    resumed(_DENSE),
)
