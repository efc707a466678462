"""Proofs of cut experts in groups: a model trains as with all experts of a rank at once."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2

GROUPS = ("--moe-experts-pipeline-degree", "2")
_MODEL = (*MODEL, *SHARED)
_SEQUENTIAL = tuple(flag for flag in _MODEL if flag != "--moe-grouped-gemm")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_CAPACITY = ("--moe-expert-capacity-factor", "1.0")


def _as_without(
    name: str,
    *layout: str,
    model: tuple[str, ...] = _MODEL,
    ranks: int = 2,
    tolerance: float = 1e-5,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    both = (*model, *TP2, *layout)
    return Scenario(
        name, flags=(*both, *GROUPS), baseline=both, world_size=ranks, tolerance=tolerance, gains=gains
    )


EXPERTS_PIPELINE_PROOFS = (
    _as_without("tp2", gains=(Gain("sent_bytes", 1.0),)),
    _as_without("ep2", *EP2, ranks=4),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, *EP2, ranks=4),
    _as_without("sequential-experts", model=_SEQUENTIAL),
    _as_without("bf16", *_BF16, tolerance=2e-2),
    _as_without("capacity", *_CAPACITY),
    _as_without("padded-capacity", *_CAPACITY, "--moe-pad-expert-input-to-capacity"),
    _as_without("recompute-full", *_FULL),
    _as_without("recompute-moe", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    _as_without("per-token-loss", "--calculate-per-token-loss"),
    Scenario(
        "one-process",
        flags=(*_MODEL, *TP2, *EP2, *GROUPS),
        baseline=_MODEL,
        world_size=4,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*_MODEL, *TP2, *_BOTH_OVERLAPS, *GROUPS),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_SHARDED), world_size=1, with_feature=False),
    ),
)
