"""The declarations of communication of experts beside computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement
from mindspeed_moe.expert_ranks import expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER

_LAYER = (
    PLACED_LAYER,
    Requirement(flag="--num-experts", reason="without experts no token travels"),
    Requirement(
        feature="grouped-experts",
        reason="weight gradients of all experts of a rank are computed at once; add --moe-grouped-gemm",
    ),
)
_CONFLICTS = (
    ORDERS_COMMUNICATION,
    Conflict(flag="--use-megatron-fsdp", reason="it frees weights between the products that are kept apart"),
)


def _dispatcher(reason: str, *kinds: str) -> Requirement:
    return Requirement(flag="--moe-token-dispatcher-type", one_of=kinds, reason=reason)


class _Overlap(Feature):
    """Common part of the overlapping features, whichever dispatcher communicates."""

    family = "moe"
    conflicts = _CONFLICTS
    slots = ("layer-schedule",)
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse layouts without communication, and shared experts that are recomputed as a whole."""
        flag, found = cls.flags[0].name, []
        size = expert_ranks(args)
        if size < 2:
            found.append(
                f"{flag} with --expert-model-parallel-size {size} has no communication to hide; use 2 or "
                "more, or drop it"
            )
        modules = getattr(args, "recompute_modules", None) or ()
        if getattr(args, "recompute_granularity", None) == "selective" and "shared_experts" in modules:
            found.append(
                f"{flag} runs the two halves of shared experts apart, which --recompute-modules "
                "shared_experts would run at once; drop it from --recompute-modules, or use moe"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return what stays exposed, and which flag changes nothing."""
        said = []
        if getattr(args, "moe_shared_expert_overlap", False):
            said.append(
                "--moe-shared-expert-overlap changes nothing, shared experts overlap in both directions"
            )
        if getattr(args, "moe_shared_expert_intermediate_size", None) is None:
            said.append("without shared experts only the gradients of dispatched rows are hidden")
        return said


class AllToAllOverlap(_Overlap):
    """Shared experts and weight gradients are computed while tokens travel."""

    name = "moe-alltoall-overlap"
    summary = "Overlap the all-to-all of tokens with shared experts and weight gradients"
    flags = (
        Flag(
            "--moe-alltoall-overlap-comm",
            help="Overlap the all-to-all of tokens with shared experts and weight gradients.",
        ),
    )
    requires = (
        *_LAYER,
        _dispatcher("it is the all-to-all that is hidden", "alltoall", "alltoall_seq"),
    )
    tuning = {"--moe-alltoall-overlap-comm": (False, True)}
    docs = "mindspeed_moe:docs/moe-alltoall-overlap.md"
    verify = Proofs("mindspeed_moe.features.proofs:OVERLAP_PROOFS")


class AllGatherOverlap(_Overlap):
    """Shared experts and weight gradients are computed while tokens are gathered and sums scattered."""

    name = "moe-allgather-overlap"
    summary = "Overlap the all-gather of tokens with shared experts and weight gradients"
    flags = (
        Flag(
            "--moe-allgather-overlap-comm",
            help="Overlap the all-gather of tokens with shared experts and weight gradients.",
        ),
    )
    requires = (
        *_LAYER,
        Requirement(
            feature="moe-async-comm",
            reason="it launches the gathering that is hidden; add --moe-permutation-async-comm",
        ),
        _dispatcher("it is the gathering that is hidden", "allgather"),
    )
    tuning = {"--moe-allgather-overlap-comm": (False, True)}
    docs = "mindspeed_moe:docs/moe-allgather-overlap.md"
    verify = Proofs("mindspeed_moe.features.proofs:GATHER_OVERLAP_PROOFS")
