"""Proofs of what crowded calls keep, and of zero memory beside other dispatchers."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import (
    EP2,
    GATHER_OVERLAP,
    GATHERED,
    MODEL,
    OVERLAP,
    SHARED,
    TP2,
    as_without,
)

_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_CROWDED = ("--moe-adaptive-recompute-activation", "--moe-adaptive-recompute-activation-scale")
_ALWAYS, _SELDOM = (*_CROWDED, "0.4"), (*_CROWDED, "1.02")
"""Every call is above twice this scale; some calls are above this one."""
_INTERLEAVED = (
    *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
    *("--num-layers-per-virtual-pipeline-stage", "1"),
)
ADAPTIVE_PROOFS = (
    as_without("ep2", flags=_ALWAYS, gains=(Gain("peak_bytes", 1.0),)),
    as_without("some-calls", flags=_SELDOM),
    as_without("overlapped", flags=(*OVERLAP, *_SELDOM)),
    as_without("gathered", model=GATHERED, flags=_ALWAYS),
    as_without("gathered-overlapped", model=GATHERED, flags=(*GATHER_OVERLAP, *_SELDOM)),
    as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, plain=_SHARDED, flags=_SELDOM),
    as_without("bf16", *_BF16, flags=_SELDOM),
    as_without("capacity", "--moe-expert-capacity-factor", "1.0", flags=(*_CROWDED, "0.8")),
    as_without("tp2-cut-experts", *TP2, ranks=4, flags=(*OVERLAP, *_SELDOM)),
    as_without("cp2", "--context-parallel-size", "2", "--position-embedding-type", "rope", flags=_SELDOM),
    as_without("interleaved", *_INTERLEAVED, ranks=4, flags=(*OVERLAP, *_SELDOM)),
    as_without("with-zero-memory", flags=(*OVERLAP, "--moe-zero-memory", "level0", *_SELDOM)),
    Scenario(
        "one-rank",
        flags=(*MODEL, *SHARED, *_ALWAYS),
        baseline=(*MODEL, *SHARED),
        tolerance=0.0,
    ),
    Scenario(
        "one-process",
        flags=(*MODEL, *SHARED, *EP2, *_SELDOM),
        baseline=(*MODEL, *SHARED),
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*MODEL, *SHARED, *EP2, *_BOTH_OVERLAPS, *_SELDOM),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *SHARED, *_SHARDED), world_size=1, with_feature=False),
    ),
)
_LEVEL0, _LEVEL1 = (("--moe-zero-memory", level) for level in ("level0", "level1"))
OTHER_DISPATCHER_PROOFS = (
    as_without("level0-without-overlap", flags=_LEVEL0),
    as_without("level1-without-overlap", *_BOTH_OVERLAPS, plain=_SHARDED, flags=_LEVEL1),
    as_without("level0-gathered", model=GATHERED, flags=(*GATHER_OVERLAP, *_LEVEL0)),
    as_without("level1-gathered", model=GATHERED, flags=_LEVEL1),
    as_without("level1-gathered-bf16", *_BF16, model=GATHERED, flags=(*GATHER_OVERLAP, *_LEVEL1)),
    as_without("level1-gathered-tp2", *TP2, ranks=4, model=GATHERED, flags=_LEVEL1),
    Scenario(
        "level1-one-rank",
        flags=(*MODEL, *SHARED, *_LEVEL1),
        baseline=(*MODEL, *SHARED),
        tolerance=0.0,
    ),
)
