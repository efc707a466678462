"""Proofs of experts that move and of hot ones that are copied: a model trains as where nothing moves."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import EP2, GATHERED, MODEL, OVERLAP, SHARED, TP2

# Eight experts on two ranks, none of them evenly loaded.
EIGHT = (*MODEL, *SHARED, "--num-experts", "8")
_EVERY = ("--enable-expert-placement", "--expert-placement-freq", "1")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")


def _as_without(
    name: str,
    *layout: str,
    ranks: int = 2,
    model: tuple[str, ...] = EIGHT,
    plain: tuple[str, ...] | None = None,
    flags: tuple[str, ...] = _EVERY,
    steps: int = 4,
    tolerance: float = 1e-6,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    return Scenario(
        name,
        flags=(*model, *EP2, *layout, *flags),
        baseline=(*model, *EP2, *(layout if plain is None else plain)),
        world_size=ranks,
        steps=steps,
        tolerance=tolerance,
        gains=gains,
    )


PLACEMENT_PROOFS = (
    _as_without("ep2"),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED),
    _as_without("bf16", *_SHARDED, *_BF16),
    _as_without("bf16-whole-optimizer", *_BF16),
    _as_without("sgd", "--optimizer", "sgd"),
    _as_without("ep2-dp2", *_BOTH_OVERLAPS, plain=_SHARDED, ranks=4),
    _as_without("tp2-cut-experts", *TP2, ranks=4),
    _as_without("tp2-whole-experts", *TP2, "--expert-tensor-parallel-size", "1"),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    _as_without("cp2", "--context-parallel-size", "2", "--position-embedding-type", "rope"),
    _as_without("sequential-experts", model=tuple(flag for flag in EIGHT if flag != "--moe-grouped-gemm")),
    _as_without("allgather", model=(*GATHERED, "--num-experts", "8")),
    _as_without("overlapped", *_BOTH_OVERLAPS, plain=_SHARDED, flags=(*OVERLAP, *_EVERY)),
    _as_without("level1", flags=(*OVERLAP, "--moe-zero-memory", "level1", *_EVERY)),
    _as_without(
        "recompute-full",
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
    ),
    _as_without("predictions", "--mtp-num-layers", "1", "--untie-embeddings-and-output-weights"),
    _as_without(
        "fine-grained-every-other-step",
        flags=(*_EVERY[:2], "2", "--enable-fine-grained-expert-placement", "--print-expert-load"),
    ),
    Scenario(
        "one-process",
        flags=(*EIGHT, *EP2, *_EVERY),
        baseline=EIGHT,
        world_size=2,
        baseline_world_size=1,
        steps=4,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*EIGHT, *EP2, *_BOTH_OVERLAPS, *_EVERY),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*EIGHT, *_SHARDED), world_size=1, with_feature=False),
        compare=("losses", "gradients", "parameters", "learning rates", "optimizer state"),
    ),
    # As many ranks of experts: loads and placements go on too.
    Scenario(
        "resume-cut-experts",
        flags=(*EIGHT, *EP2, *_BOTH_OVERLAPS, *_EVERY),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*EIGHT, *EP2, *TP2, *_SHARDED, *_EVERY), world_size=4),
    ),
    Scenario(
        "resume-on-four",
        flags=(*EIGHT, *EP2, *_EVERY),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(
            flags=(
                *(flag for flag in EIGHT if flag != "--moe-grouped-gemm"),
                *("--expert-model-parallel-size", "4"),
                *_EVERY,
            ),
            world_size=4,
        ),
        compare=("losses", "gradients", "parameters", "learning rates"),
    ),
)
HOT = (
    *("--balanced-moe-experts", "--balanced-moe-hot-expert-num", "2"),
    *("--trans-hot-expert-group-num", "2"),
)
_EP4 = ("--expert-model-parallel-size", "4")
BALANCED_PROOFS = (
    _as_without("ep2", flags=HOT),
    _as_without("ep4", *_EP4, flags=HOT, ranks=4),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED, flags=HOT),
    # Sums of gradients are rounded in another order.
    _as_without("bf16", *_SHARDED, *_BF16, flags=HOT, steps=1, tolerance=2e-2),
    _as_without("ep2-dp2", *_BOTH_OVERLAPS, plain=_SHARDED, ranks=4, flags=HOT),
    _as_without("tp2", *TP2, "--expert-tensor-parallel-size", "1", flags=HOT),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4, flags=HOT),
    _as_without("cp2", "--context-parallel-size", "2", "--position-embedding-type", "rope", flags=HOT),
    _as_without(
        "recompute-full",
        *("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        flags=HOT,
    ),
    Scenario(
        "one-process",
        flags=(*EIGHT, *EP2, *HOT),
        baseline=EIGHT,
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*EIGHT, *EP2, *_BOTH_OVERLAPS, *HOT),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*EIGHT, *_SHARDED), world_size=1, with_feature=False),
    ),
)
