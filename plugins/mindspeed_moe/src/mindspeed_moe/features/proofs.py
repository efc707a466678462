"""Proofs of the features: a model trains as with megatron-core's own layer of experts, to the bit."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
MODEL = (
    *("--adam-eps", "1e-3", "--swiglu", "--disable-bias-linear", "--num-layers", "2"),
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-aux-loss-coeff", "0.01", "--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
)
SHARED = ("--moe-shared-expert-intermediate-size", "48")
OVERLAP = ("--moe-alltoall-overlap-comm",)
EP2 = ("--expert-model-parallel-size", "2")
TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


def as_without(
    name: str,
    *layout: str,
    ranks: int = 2,
    model: tuple[str, ...] = (*MODEL, *SHARED),
    plain: tuple[str, ...] | None = None,
    flags: tuple[str, ...] = OVERLAP,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    """Compare a model with a feature to the same one without it, on the same ranks, bit for bit.

    Args:
        name: of the scenario.
        layout: further flags.
        ranks: processes.
        model: flags of both sides.
        plain: further flags of the side without, ``layout`` by default.
        flags: of the feature.
        gains: what must not be worse, or is reported.
    """
    return Scenario(
        name,
        flags=(*model, *EP2, *layout, *flags),
        baseline=(*model, *EP2, *(layout if plain is None else plain)),
        world_size=ranks,
        tolerance=0.0,
        gains=gains,
    )


def _resumed(*flags: str, model: tuple[str, ...] = (*MODEL, *SHARED)) -> Scenario:
    """Continue the checkpoint of two ranks as it was, and on one rank without the feature."""
    return Scenario(
        "resume",
        flags=(*model, *EP2, *_BOTH_OVERLAPS, *flags),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*model, *_SHARDED), world_size=1, with_feature=False),
    )


_AS_MUCH_SENT = (Gain("collective_calls", 1.0), Gain("sent_bytes", 1.0))
OVERLAP_PROOFS = (
    as_without("ep2", gains=_AS_MUCH_SENT),
    as_without("no-shared-experts", model=MODEL),
    as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED),
    as_without("bf16", *_BF16),
    as_without("accumulated-in-place", "--gemm-gradient-accumulation-fusion"),
    as_without("recompute-moe", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    as_without("recompute-full", *_FULL),
    as_without("capacity", "--moe-expert-capacity-factor", "1.0"),
    as_without(
        "padded-capacity", "--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"
    ),
    as_without("tp2-whole-experts", *TP2, "--expert-tensor-parallel-size", "1"),
    as_without("tp2-cut-experts", *TP2, ranks=4),
    as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    as_without("predictions", "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
    as_without("dense-then-experts", "--moe-layer-freq", "[0,1]"),
    as_without(
        "interleaved",
        *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
        ranks=4,
    ),
    as_without("ep2-dp2", *_BOTH_OVERLAPS, plain=_SHARDED, ranks=4),
    Scenario(
        "one-process",
        flags=(*MODEL, *SHARED, *EP2, *OVERLAP),
        baseline=(*MODEL, *SHARED),
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    _resumed(*OVERLAP),
)
GATHERED = (*MODEL, *SHARED, "--moe-token-dispatcher-type", "allgather")
_ASYNC = ("--moe-permutation-async-comm",)
GATHER_OVERLAP = (*_ASYNC, "--moe-allgather-overlap-comm")
GATHER_OVERLAP_PROOFS = (
    as_without("ep2", model=GATHERED, flags=GATHER_OVERLAP, gains=_AS_MUCH_SENT),
    as_without(
        "distributed-optimizer-overlapped",
        *_BOTH_OVERLAPS,
        plain=_SHARDED,
        model=GATHERED,
        flags=GATHER_OVERLAP,
    ),
    as_without("bf16", *_BF16, model=GATHERED, flags=GATHER_OVERLAP),
    as_without(
        "recompute-moe",
        *("--recompute-granularity", "selective", "--recompute-modules", "moe"),
        model=GATHERED,
        flags=GATHER_OVERLAP,
    ),
    as_without("tp2-cut-experts", *TP2, ranks=4, model=GATHERED, flags=GATHER_OVERLAP),
    Scenario(
        "one-process",
        flags=(*GATHERED, *EP2, *GATHER_OVERLAP),
        baseline=GATHERED,
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    _resumed(*GATHER_OVERLAP, model=GATHERED),
)
_SEQUENTIAL = tuple(flag for flag in MODEL if flag != "--moe-grouped-gemm")
ASYNC_PROOFS = (
    as_without("allgather", model=GATHERED, flags=_ASYNC),
    as_without("alltoall", flags=_ASYNC),
    as_without("sequential-experts", model=_SEQUENTIAL, flags=_ASYNC),
    as_without(
        "distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED, model=GATHERED, flags=_ASYNC
    ),
    as_without("bf16", *_BF16, model=GATHERED, flags=_ASYNC),
    as_without("tp2-cut-experts", *TP2, ranks=4, flags=_ASYNC),
    Scenario(
        "one-rank",
        flags=(*MODEL, *SHARED, *_ASYNC),
        baseline=(*MODEL, *SHARED),
        tolerance=0.0,
    ),
    _resumed(*_ASYNC, model=GATHERED),
)
_LEVEL0 = (*OVERLAP, "--moe-zero-memory", "level0")
_LEVEL1 = (*OVERLAP, "--moe-zero-memory", "level1")
ZERO_MEMORY_PROOFS = (
    as_without("level0", flags=_LEVEL0, gains=(Gain("peak_bytes"),)),
    as_without("level1", flags=_LEVEL1, gains=(Gain("peak_bytes", 1.0),)),
    as_without("level1-one-layer", flags=(*_LEVEL1, "--moe-zero-memory-num-layers", "1")),
    as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED, flags=_LEVEL1),
    as_without("bf16", *_BF16, flags=_LEVEL1),
    as_without("accumulated-in-place", "--gemm-gradient-accumulation-fusion", flags=_LEVEL0),
    as_without("capacity", "--moe-expert-capacity-factor", "1.0", flags=_LEVEL1),
    as_without("tp2-cut-experts", *TP2, ranks=4, flags=_LEVEL1),
    as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4, flags=_LEVEL0),
    _resumed(*_LEVEL1),
)
CORE_PROOFS = (as_without("ep2"), _resumed(*OVERLAP))
_TWO = ("--n-shared-experts", "2")
SHARED_PROOFS = (
    Scenario(
        "two",
        flags=(*MODEL, *_TWO),
        baseline=(*MODEL, "--moe-shared-expert-intermediate-size", "64"),
        tolerance=0.0,
    ),
    Scenario(
        "resume",
        flags=(*MODEL, *EP2, *_BOTH_OVERLAPS, *_TWO),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *_SHARDED, *_TWO), world_size=1),
    ),
)
_SEQ = ("--moe-token-dispatcher-type", "alltoall_seq")
SEQUENTIAL_DISPATCHER_PROOFS = (
    as_without("overlapped", *_BOTH_OVERLAPS, flags=(*OVERLAP, *_SEQ)),
    as_without("tp2-ep2", *TP2, ranks=4, flags=_SEQ),
    _resumed(*_SEQ),
)
_GROUPS = ("--num-experts", "8", "--moe-router-num-groups", "4", "--moe-router-group-topk", "2")
_DEVICE_LOSSES = ("--moe-device-level-aux-loss-coeff", "0.5", "--moe-comm-aux-loss-coeff", "0.2")
_BALANCED = (*MODEL, *_GROUPS, *_DEVICE_LOSSES)
_FIXED = (*MODEL, "--fix-router")
_CP2 = ("--context-parallel-size", "2", "--position-embedding-type", "rope")


def _as_on_one_rank(
    name: str, model: tuple[str, ...], *layout: str, ranks: int = 2, both: tuple[str, ...] = ()
) -> Scenario:
    """Compare a model with a feature on several ranks to the same one on one rank."""
    return Scenario(
        name,
        flags=(*model, *layout, *both),
        baseline=(*model, *both),
        world_size=ranks,
        baseline_world_size=1,
        same_feature=True,
        tolerance=1e-5,
    )


def _on_other_layouts(model: tuple[str, ...]) -> tuple[Scenario, ...]:
    """Compare a router of this package on several ranks to the same one on one rank."""
    per_token = ("--calculate-per-token-loss",)
    whole = (*TP2, "--expert-tensor-parallel-size", "1")
    return (
        _as_on_one_rank("ep2", model, *EP2, *_BOTH_OVERLAPS),
        _as_on_one_rank("tp2", model, *TP2),
        _as_on_one_rank("tp2-per-token-loss", model, *whole, *EP2, both=per_token),
        _as_on_one_rank("cp2-per-token-loss", model, *_CP2, both=(*per_token, *_CP2[2:])),
        _as_on_one_rank("cp2", model, *_CP2, both=_CP2[2:]),
        _as_on_one_rank("recompute", model, *EP2, *_FULL),
        _as_on_one_rank("overlapped", model, *EP2, *OVERLAP),
        Scenario(
            "resume",
            flags=(*model, *EP2, *_BOTH_OVERLAPS),
            world_size=2,
            tolerance=1e-5,
            resume=Resume(flags=(*model, *_SHARDED), world_size=1),
        ),
    )


DEVICE_LOSS_PROOFS = _on_other_layouts(_BALANCED)
FIXED_ROUTE_PROOFS = _on_other_layouts(_FIXED)
_FUSED = ("--use-fused-moe-token-permute-and-unpermute",)
PERMUTE_PROOFS = (
    as_without("ep2", flags=_FUSED),
    as_without("megatron-lms-flag", flags=("--moe-permute-fusion",)),
    as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED, flags=_FUSED),
    as_without("bf16", *_BF16, flags=_FUSED),
    as_without(
        "padded-capacity",
        *("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"),
        flags=_FUSED,
    ),
    as_without("recompute-full", *_FULL, flags=_FUSED),
    as_without("tp2-cut-experts", *TP2, ranks=4, flags=_FUSED),
    as_without("overlapped", flags=(*OVERLAP, *_FUSED)),
    as_without("level1", flags=(*_LEVEL1, *_FUSED)),
    Scenario("one-rank", flags=(*MODEL, *SHARED, *_FUSED), baseline=(*MODEL, *SHARED), tolerance=0.0),
    _resumed(*_FUSED),
)
