"""The declaration of forward and backward passes side by side."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement, hookimpl
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.fb_overlap_proofs import FB_OVERLAP_PROOFS
from mindspeed_moe.options import PAIRS

_FLAG = "--moe-fb-overlap"
_KEPT, _SWAPPED = "--moe-unperm2-mem-optim", "--moe-unperm2-mem-optim-swap"


class ForwardBackwardOverlap(Feature):
    """Exchanges of one micro-batch run under the computation of another one."""

    name = PAIRS
    family = "moe"
    summary = "All-to-alls of one micro-batch under computation of another, forward beside backward"
    flags = (
        Flag(_FLAG, help="Run the forward pass of a micro-batch beside the backward pass of another."),
    )
    requires = (PLACED_LAYER,)
    conflicts = (ORDERS_COMMUNICATION,)
    slots = ("layer-schedule",)
    docs = "mindspeed_moe:docs/moe-fb-overlap.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = FB_OVERLAP_PROOFS

    @hookimpl(wrapper=True)
    def get_forward_backward(self, session: Any) -> Generator[None, Any, Any]:
        """Let the passes of two micro-batches take turns."""
        schedule = yield
        from mindspeed_moe.paired_schedule import PairedSchedule

        return PairedSchedule(session, schedule)
