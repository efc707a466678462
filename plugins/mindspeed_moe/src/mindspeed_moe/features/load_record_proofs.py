"""Proofs of the file of loads: a training with it is the same to the bit."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED

_EMPTY = "mindspeed_moe.features.load_record_proofs:nothing"
_LOG = ("--moe-load-log", "{files}/loads.jsonl")
_EXPERTS = (*MODEL, *SHARED, *EP2)
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")


def nothing(folder: object) -> None:
    """Write no file into the folder that the log goes to."""


def _as_without(name: str, *both: str, ranks: int = 2) -> Scenario:
    return Scenario(
        name,
        flags=(*_EXPERTS, *both, *_LOG),
        baseline=(*_EXPERTS, *both),
        world_size=ranks,
        tolerance=0.0,
        files=(_EMPTY,),
    )


LOAD_RECORD_PROOFS = (
    _as_without("ep2"),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS),
    _as_without("bf16", "--bf16", "--moe-router-dtype", "fp32"),
    _as_without("recompute", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    Scenario(
        "resume",
        flags=(*_EXPERTS, *_BOTH_OVERLAPS, *_LOG),
        world_size=2,
        tolerance=1e-5,
        files=(_EMPTY,),
        resume=Resume(flags=(*MODEL, *SHARED, *_SHARDED), world_size=1, with_feature=False),
    ),
)
