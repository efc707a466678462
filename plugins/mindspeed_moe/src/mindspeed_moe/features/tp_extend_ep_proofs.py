"""Proofs of experts that tensor parallelism spreads: the same as the two sizes that they stand for."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, OVERLAP, SHARED, TP2

_FLAG = ("--moe-tp-extend-ep",)
_EXPERTS = (*MODEL, *SHARED)
_WHOLE = ("--expert-tensor-parallel-size", "1")
_EP4 = ("--expert-model-parallel-size", "4")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")


def _as_sizes(name: str, *both: str, ranks: int = 2, own: tuple[str, ...] = ()) -> Scenario:
    """Compare the flag to the sizes that it stands for, bit for bit."""
    sizes = EP2 if ranks == 2 else _EP4
    return Scenario(
        name,
        flags=(*_EXPERTS, *TP2, *own, *both, *_FLAG),
        baseline=(*_EXPERTS, *TP2, *sizes, *_WHOLE, *both),
        world_size=ranks,
        tolerance=0.0,
    )


TP_EXTEND_EP_PROOFS = (
    _as_sizes("tp2"),
    _as_sizes("tp2-ep2", ranks=4, own=EP2),
    _as_sizes("tp2-ep2-overlapped", *OVERLAP, ranks=4, own=EP2),
    _as_sizes("distributed-optimizer-overlapped", *_BOTH_OVERLAPS),
    _as_sizes("bf16", "--bf16", "--moe-router-dtype", "fp32"),
    _as_sizes("per-token-loss", "--calculate-per-token-loss"),
    _as_sizes("capacity", "--moe-expert-capacity-factor", "1.0"),
    Scenario(
        "one-process",
        flags=(*_EXPERTS, *TP2, *EP2, *_FLAG),
        baseline=_EXPERTS,
        world_size=4,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "pp2",
        flags=(*_EXPERTS, *TP2, "--pipeline-model-parallel-size", "2", *_FLAG),
        baseline=_EXPERTS,
        world_size=4,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*_EXPERTS, *TP2, *_BOTH_OVERLAPS, *_FLAG),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_EXPERTS, *_SHARDED), world_size=1, with_feature=False),
    ),
)
