"""Proofs of products that exchange rows: a model trains as with exchanges of their own."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2

ROWS = ("--moe-alltoall-mc2",)
PLACES = ("--moe-bmm-mc2",)
PADDED = ("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity")
_MODEL = (*MODEL, *SHARED)
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_WHOLE = (*TP2, "--expert-tensor-parallel-size", "1")


def _as_without(
    name: str,
    *layout: str,
    flags: tuple[str, ...] = ROWS,
    ranks: int = 2,
    tolerance: float = 1e-5,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    both = (*_MODEL, *EP2, *layout)
    return Scenario(
        name, flags=(*both, *flags), baseline=both, world_size=ranks, tolerance=tolerance, gains=gains
    )


FUSED_PRODUCTS_PROOFS = (
    _as_without("rows", gains=(Gain("sent_bytes", 1.0),)),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS),
    _as_without("bf16", *_BF16, tolerance=2e-2),
    _as_without("one-expert-of-a-rank", "--num-experts", "2"),
    _as_without("tp2-whole-experts", *_WHOLE),
    _as_without("recompute-full", *_FULL),
    _as_without("recompute-moe", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    _as_without("per-token-loss", "--calculate-per-token-loss"),
    _as_without("places", *TP2, *PADDED, flags=PLACES, ranks=4),
    _as_without(
        "places-distributed-optimizer-overlapped", *TP2, *PADDED, *_BOTH_OVERLAPS, flags=PLACES, ranks=4
    ),
    _as_without("places-bf16", *TP2, *PADDED, *_BF16, flags=PLACES, ranks=4, tolerance=2e-2),
    _as_without("places-recompute-full", *TP2, *PADDED, *_FULL, flags=PLACES, ranks=4),
    Scenario(
        "one-process",
        flags=(*_MODEL, *EP2, *ROWS),
        baseline=_MODEL,
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*_MODEL, *EP2, *_BOTH_OVERLAPS, *ROWS),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_SHARDED), world_size=1, with_feature=False),
    ),
)
