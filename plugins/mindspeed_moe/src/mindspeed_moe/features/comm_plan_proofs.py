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
        name, flags=(*model, *flags), baseline=(*model, *plain), world_size=ranks, tolerance=tolerance, gains=gains
    )


COMM_PLAN_PROOFS = (
    _as_flat("zerc-ep2", *_ZERC, both=_CHOICES, gains=(Gain("sent_bytes", 1.0),)),
    _as_flat("dedup-nodes", *_PLAN, "dedup", *_NODES, layout=_EP4, ranks=4, both=_CHOICES),
    _as_flat("gather-nodes", *_PLAN, "gather", *_NODES, layout=_EP4, ranks=4, both=_CHOICES),
    _as_flat("hierarchical", "--moe-hierarchical-alltoallv", *_NODES, layout=_EP4, ranks=4, both=_CHOICES),
    _as_flat("overlapped", *_ZERC, *OVERLAP, both=_CHOICES, plain=OVERLAP),
)
