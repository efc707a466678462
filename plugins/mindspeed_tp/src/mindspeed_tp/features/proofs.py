"""Proofs of the features: a model trains as on one process, or as with megatron-core's own linears."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import Gain, Resume, Scenario

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
MODEL = (
    *("--adam-eps", "1e-3", "--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--num-layers", "2", "--position-embedding-type", "rope"),
)
PLAIN = ("--adam-eps", "1e-3", "--num-layers", "2")
"""With biases, LayerNorm, GELU and learned positions."""
TP2 = ("--tensor-model-parallel-size", "2")
SP = ("--sequence-parallel",)
PP2 = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = ("--num-layers", "4", *PP2, "--num-layers-per-virtual-pipeline-stage", "1")
GQA = ("--group-query-attention", "--num-query-groups", "2")
SHARDED = ("--use-distributed-optimizer",)
BOTH_OVERLAPS = (*SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
KERNELS = ("--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--use-flash-attn")
COC = ("--use-ascend-coc", "--coc-parallel-num")
REWRITTEN = ("--use-ascend-coc", "--coc-mode", "1")


def as_without(
    name: str,
    flags: tuple[str, ...],
    *layout: str,
    ranks: int = 2,
    model: tuple[str, ...] = MODEL,
    tolerance: float = 0.0,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    """Compare a model with a feature to the same one without it, on the same ranks.

    Args:
        name: of the scenario.
        flags: of the feature.
        layout: further flags of both sides.
        ranks: processes.
        model: flags of both sides.
        tolerance: as in `Scenario`.
        gains: as in `Scenario`.
    """
    return Scenario(
        name,
        flags=(*model, *layout, *flags),
        baseline=(*model, *layout),
        world_size=ranks,
        tolerance=tolerance,
        gains=gains,
    )


def as_on_one(
    name: str,
    flags: tuple[str, ...],
    *layout: str,
    ranks: int = 2,
    model: tuple[str, ...] = MODEL,
    both: tuple[str, ...] = (),
    tolerance: float = 1e-5,
) -> Scenario:
    """Compare a model with a feature, on several ranks, to the same one without it on one rank.

    Args:
        name: of the scenario.
        flags: of the feature.
        layout: further flags of its side.
        ranks: processes of its side.
        model: flags of both sides.
        both: further flags of both sides.
        tolerance: as in `Scenario`.
    """
    return Scenario(
        name,
        flags=(*model, *both, *layout, *flags),
        baseline=(*model, *both),
        world_size=ranks,
        baseline_world_size=1,
        tolerance=tolerance,
        steps=5,
    )


def resumed(
    flags: tuple[str, ...],
    *layout: str,
    ranks: int = 2,
    model: tuple[str, ...] = MODEL,
    tolerance: float = 1e-5,
) -> Scenario:
    """Continue a checkpoint as it was, and on one rank without the feature.

    Args:
        flags: of the feature.
        layout: further flags of its side.
        ranks: processes of its side.
        model: flags of both sides.
        tolerance: as in `Scenario`.
    """
    return Scenario(
        "resume",
        flags=(*model, *layout, *flags),
        world_size=ranks,
        tolerance=tolerance,
        resume=Resume(flags=(*model, *SHARDED), world_size=1, with_feature=False),
    )


AS_MUCH_SENT = (Gain("sent_bytes", 1.0), Gain("peak_bytes"))
LINEAR_PROOFS = (
    as_without("tp2-sp", REWRITTEN, *TP2, *SP, gains=AS_MUCH_SENT),
    as_without("tp2", REWRITTEN, *TP2),
    as_without("biases", REWRITTEN, *TP2, *SP, model=PLAIN),
    resumed(REWRITTEN, *TP2, *SP, *BOTH_OVERLAPS),
)
_LINE = 1e-5
COC_PROOFS = (
    as_without("tp2-sp", (*COC, "4"), *TP2, *SP, tolerance=_LINE, gains=(Gain("sent_bytes", 1.0),)),
    as_without("tp2", (*COC, "2"), *TP2, tolerance=_LINE),
    as_without("biases", (*COC, "8"), *TP2, *SP, model=PLAIN, tolerance=_LINE),
    as_without("rewritten", REWRITTEN, *TP2, *SP),
    as_on_one("one-process", (*COC, "4"), *TP2, *SP, *BOTH_OVERLAPS, both=GQA),
    as_on_one("kernels", (*COC, "2"), *TP2, *SP, *KERNELS),
    as_without("bf16", (*COC, "4"), *TP2, *SP, "--bf16", tolerance=5e-2),
    as_without("pp2", (*COC, "2"), *TP2, *SP, *PP2, ranks=4, tolerance=_LINE),
    as_without("interleaved", (*COC, "2"), *TP2, *SP, *INTERLEAVED, ranks=4, tolerance=_LINE),
    as_without("recompute-full", (*COC, "2"), *TP2, *SP, *FULL, tolerance=_LINE),
    as_without(
        "accumulated-in-place",
        (*COC, "2"),
        *(*TP2, *SP, "--use-gradient-accumulation-fusion"),
        tolerance=_LINE,
    ),
    as_without(
        "experts",
        (*COC, "2"),
        *(*TP2, *SP, "--num-experts", "2", "--moe-shared-expert-intermediate-size", "48"),
        *("--moe-token-dispatcher-type", "alltoall"),
        tolerance=_LINE,
    ),
    as_without(
        "predictions",
        (*COC, "2"),
        *(*TP2, *SP, "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
        tolerance=_LINE,
    ),
    as_without("latent-attention", (*COC, "2"), *TP2, *SP, "--multi-latent-attention", tolerance=_LINE),
    as_without("fused-kernel", ("--use-ascend-coc", "--coc-fused-kernel"), *TP2, *SP, tolerance=_LINE),
    resumed((*COC, "4"), *TP2, *SP, *BOTH_OVERLAPS),
)
_MC2 = ("--use-ascend-mc2",)
_WIDE = (*MODEL, "--hidden-size", "512", "--ffn-hidden-size", "512", "--num-layers", "1")
MC2_PROOFS = (
    as_without("tp2-sp", _MC2, *TP2, *SP, gains=AS_MUCH_SENT),
    as_without("tp2", _MC2, *TP2),
    # Kernels sum over 256 elements and more, and round the sum of all ranks once.
    as_without("bf16", _MC2, *TP2, *SP, "--bf16", model=_WIDE, tolerance=3e-2),
    as_on_one("one-process", _MC2, *TP2, *SP, *BOTH_OVERLAPS),
    resumed(_MC2, *TP2, *SP, *BOTH_OVERLAPS),
)
_LEVEL1, _LEVEL2 = (("--optimize-recomp-communication-level", level) for level in "12")
# A norm of several operations adds up the gradients of its input, in another order inside a segment.
_ONE_NODE = ("--use-fused-rmsnorm",)
_DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")


def _full(name: str, flags: tuple[str, ...], *layout: str, calls: float, **facts: Any) -> Scenario:
    """Compare with plain full recomputation: the same bits, fewer collectives."""
    gains = (Gain("collective_calls", calls), Gain("sent_bytes", 1.0), Gain("peak_bytes", 1.0))
    return as_without(name, flags, *TP2, *layout, *FULL, gains=gains, tolerance=_LINE, **facts)


RECOMPUTE_PROOFS = (
    _full("level2", _LEVEL2, calls=0.8),
    _full("level1", _LEVEL1, calls=0.9),
    _full("level2-sp", _LEVEL2, *SP, calls=0.85),
    _full("level1-sp", _LEVEL1, *SP, calls=0.97),
    Scenario(
        "as-without-recomputation",
        flags=(*MODEL, *_ONE_NODE, *TP2, *SP, *FULL, *_LEVEL2, *_DROPOUT),
        baseline=(*MODEL, *_ONE_NODE, *TP2, *SP, *_DROPOUT),
        world_size=2,
        tolerance=0.0,
        gains=(Gain("sent_bytes", 1.0), Gain("peak_bytes", 1.0)),
    ),
    _full("gathered-again", (*_LEVEL2, "--no-recompute-comm-save-gathered"), *SP, calls=0.95),
    _full("distributed-optimizer-overlapped", _LEVEL2, *SP, *BOTH_OVERLAPS, calls=1.0),
    _full("biases", _LEVEL2, *SP, calls=0.9, model=PLAIN),
    _full("bf16", _LEVEL2, *SP, "--bf16", *_ONE_NODE, calls=0.9),
    _full("interleaved", _LEVEL2, *SP, *INTERLEAVED, calls=1.0, ranks=4),
    as_without(
        "block",
        _LEVEL2,
        *(*TP2, *SP, "--recompute-granularity", "full", "--recompute-method", "block"),
        *("--recompute-num-layers", "1"),
        tolerance=_LINE,
    ),
    as_without("in-parts", (*_LEVEL2, *COC, "2"), *TP2, *SP, *FULL, tolerance=_LINE),
    as_without(
        "experts",
        _LEVEL2,
        *(*TP2, *SP, *FULL, "--num-experts", "2", "--moe-shared-expert-intermediate-size", "48"),
        *("--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
        tolerance=_LINE,
    ),
    as_without(
        "predictions",
        _LEVEL2,
        *(*TP2, *SP, *FULL, "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
        tolerance=_LINE,
    ),
    as_without("latent-attention", _LEVEL2, *TP2, *SP, *FULL, "--multi-latent-attention", tolerance=_LINE),
    as_on_one("one-process", _LEVEL2, *TP2, *SP, *FULL, *BOTH_OVERLAPS),
    as_on_one("kernels", _LEVEL2, *TP2, *SP, *FULL, *KERNELS, both=GQA),
    resumed(_LEVEL2, *TP2, *SP, *FULL, *BOTH_OVERLAPS),
)
