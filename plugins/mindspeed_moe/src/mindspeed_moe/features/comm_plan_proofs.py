"""Proofs of plans of communication: a model trains as with one exchange of all rows."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, OVERLAP, SHARED, TP2

_PLAN = ("--moe-comm-plan",)
_ZERC = ("--moe-zerc",)
_EP4 = ("--expert-model-parallel-size", "4")
_NODES = ("--moe-node-size", "2")
_CHOICES = ("--num-experts", "8", "--moe-router-topk", "4")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_WHOLE = ("--expert-tensor-parallel-size", "1")


def _as_flat(
    name: str,
    *flags: str,
    layout: tuple[str, ...] = EP2,
    ranks: int = 2,
    both: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    tolerance: float = 1e-5,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    """Compare a plan to one exchange of all rows on the same ranks."""
    model = (*MODEL, *SHARED, *layout, *both)
    return Scenario(
        name,
        flags=(*model, *flags),
        baseline=(*model, *plain),
        world_size=ranks,
        tolerance=tolerance,
        gains=gains,
    )


_DEDUP = (*_PLAN, "dedup", *_NODES)
_GATHER = (*_PLAN, "gather", *_NODES)
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")


def _as_in_one_process(name: str, *flags: str, layout: tuple[str, ...], ranks: int) -> Scenario:
    model = (*MODEL, *SHARED, *_CHOICES)
    return Scenario(
        name,
        flags=(*model, *layout, *flags),
        baseline=model,
        world_size=ranks,
        baseline_world_size=1,
        tolerance=1e-5,
    )


COMM_PLAN_PROOFS = (
    _as_flat("zerc-ep2", *_ZERC, both=_CHOICES, gains=(Gain("sent_bytes", 1.0),)),
    _as_flat("dedup-nodes", *_DEDUP, layout=_EP4, ranks=4, both=_CHOICES),
    _as_flat("gather-nodes", *_GATHER, layout=_EP4, ranks=4, both=_CHOICES),
    _as_flat("hierarchical", "--moe-hierarchical-alltoallv", *_NODES, layout=_EP4, ranks=4, both=_CHOICES),
    _as_flat("distributed-optimizer-overlapped", *_ZERC, *_BOTH_OVERLAPS[1:], both=(*_CHOICES, *_SHARDED)),
    _as_flat("bf16", *_ZERC, both=_BF16),
    _as_flat("capacity", *_ZERC, both=(*_CHOICES, "--moe-expert-capacity-factor", "1.0")),
    _as_flat("gather-capacity", *_GATHER, layout=_EP4, ranks=4, both=("--moe-expert-capacity-factor", "0.5")),
    _as_flat(
        "recompute", *_ZERC, both=("--recompute-granularity", "selective", "--recompute-modules", "moe")
    ),
    _as_flat("overlapped", *_ZERC, *OVERLAP, both=_CHOICES, plain=OVERLAP),
    _as_flat("dedup-overlapped", *_DEDUP, *OVERLAP, layout=_EP4, ranks=4, both=_CHOICES, plain=OVERLAP),
    _as_flat("level0", *_DEDUP, *OVERLAP, "--moe-zero-memory", "level0", layout=_EP4, ranks=4),
    _as_flat("level1", *_GATHER, *OVERLAP, "--moe-zero-memory", "level1", layout=_EP4, ranks=4),
    _as_flat("pp2", *_ZERC, layout=(*EP2, "--pipeline-model-parallel-size", "2"), ranks=4),
    _as_in_one_process("one-process", *_ZERC, layout=EP2, ranks=2),
    _as_in_one_process("dedup-one-process", *_DEDUP, layout=_EP4, ranks=4),
    _as_in_one_process("tp2-whole-experts", *_ZERC, layout=(*TP2, *EP2, *_WHOLE), ranks=2),
    _as_in_one_process("tp2-extended", *_DEDUP, "--moe-tp-extend-ep", layout=(*TP2, *EP2), ranks=4),
    Scenario(
        "resume",
        flags=(*MODEL, *SHARED, *EP2, *_BOTH_OVERLAPS, *_ZERC),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *SHARED, *_SHARDED), world_size=1, with_feature=False),
    ),
)
