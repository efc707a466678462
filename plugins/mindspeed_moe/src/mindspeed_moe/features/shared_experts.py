"""The declaration of shared experts by their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs, Requirement

_FLAG = "--n-shared-experts"
_WIDTH = "moe_shared_expert_intermediate_size"


class SharedExpertCount(Feature):
    """Shared experts, given as a number of experts of the routed ones' width."""

    name = "moe-shared-experts"
    family = "moe"
    summary = "Set shared experts by their number"
    level = 0
    flags = (Flag(_FLAG, type=int, help="Number of shared experts, each as wide as a routed one."),)
    requires = (Requirement(flag="--num-experts", reason="shared experts stand beside routed ones"),)
    docs = "mindspeed_moe:docs/moe-shared-experts.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.proofs:SHARED_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a number is given, a wrong one included."""
        return getattr(args, "n_shared_experts", None) is not None

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Set the width of all shared experts together."""
        count, width = getattr(args, "n_shared_experts", None), _width(args)
        return {_WIDTH: count * width} if count and count > 0 and width else {}

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers that are none, and two widths."""
        count, width = args.n_shared_experts, _width(args)
        if count < 1:
            return (f"{_FLAG} {count} is no number of experts; use 1 or more, or drop it",)
        if not width:
            return (f"{_FLAG} {count} needs the width of an expert; add --moe-ffn-hidden-size",)
        given = getattr(args, _WIDTH, None)
        if given is not None and given != count * width:
            return (
                f"{_FLAG} {count} and --moe-shared-expert-intermediate-size {given} cannot be used together: "
                f"{count} experts of width {width} have {count * width}; drop one of the two",
            )
        return ()


def _width(args: Any) -> int | None:
    """Return the width of a routed expert, None where no flag says it."""
    width: int | None = getattr(args, "moe_ffn_hidden_size", None) or getattr(args, "ffn_hidden_size", None)
    return width


def shared_experts_on_a_stream(flag: str, args: Any) -> Sequence[str]:
    """Refuse shared experts on a stream of their own, which follow megatron-core's dispatcher.

    Args:
        flag: of a feature that has another dispatcher.
        args: the arguments.
    """
    overlapped = getattr(args, "moe_alltoall_overlap_comm", False)
    if getattr(args, "moe_shared_expert_overlap", False) and not overlapped:
        return (
            f"{flag} with --moe-shared-expert-overlap: the dispatcher calls no shared experts; add "
            "--moe-alltoall-overlap-comm, which overlaps them in both directions, or drop one of the two",
        )
    return ()
