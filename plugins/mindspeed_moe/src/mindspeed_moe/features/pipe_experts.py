"""The declaration of experts that are computed while rows of the next ones travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement
from mindspeed_moe.expert_ranks import expert_cuts, expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import has_places, items_of_layer

_FLAG, _SLICES, _APART = "--use-pipe-experts", "--pipe-experts-multi-data", "--pipe-experts-multi-stream"


class PipelinedExperts(Feature):
    """Rows of one expert travel while another expert of the rank is computed."""

    name = "moe-pipe-experts"
    family = "moe"
    summary = "Overlap the all-to-all of one expert with the computation of another"
    flags = (
        Flag(_FLAG, help="Overlap the all-to-all of one expert with the computation of another."),
        Flag(
            _SLICES,
            type=int,
            default=1,
            help="Slices of each expert's capacity that are sent separately.",
        ),
        Flag(_APART, help="Never run expert all-to-alls and tensor-parallel all-gathers at the same time."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no row travels"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="it is the all-to-all that is cut by experts",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        *(
            Conflict(flag=flag, reason="rows are sorted for all experts at once; drop one of the two")
            for flag in ("--use-fused-moe-token-permute-and-unpermute", "--moe-permute-fusion")
        ),
        Conflict(
            flag="--moe-pad-expert-input-to-capacity",
            reason="places that are cut are those of --moe-model-type deepspeed_moe; use it, or drop one",
        ),
        Conflict(
            flag="--moe-apply-probs-on-input",
            reason="weights multiply the results of experts; drop one of the two",
        ),
        Conflict(
            flag="--gemm-gradient-accumulation-fusion",
            reason="weight gradients of experts are computed one by one; drop one of the two",
        ),
        Conflict(
            flag="--use-megatron-fsdp", reason="it frees weights between the products that are kept apart"
        ),
    )
    slots = ("layer-schedule",)
    docs = "mindspeed_moe:docs/moe-pipe-experts.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (False, True), _SLICES: (1, 2)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.pipe_experts_proofs:PIPE_EXPERTS_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether it is asked for, or an option of it, which needs it."""
        return bool(getattr(args, "use_pipe_experts", False)) or _slices(args) != 1 or _apart(args)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse slices that are none, layouts without communication, and rows that are not padded."""
        slices = _slices(args)
        if not args.use_pipe_experts:
            option, given = (_SLICES, f"{_SLICES} {slices}") if slices != 1 else (_APART, _APART)
            return (f"{given} needs {_FLAG}; add it, or drop {option}",)
        found = []
        if slices < 1:
            found.append(f"{_SLICES} {slices} is no number of slices; use 1 or more")
        size = expert_ranks(args)
        if size < 2:
            found.append(
                f"{_FLAG} with --expert-model-parallel-size {size} has no communication to hide; use 2 or "
                "more, or drop it"
            )
        found += shared_experts_on_a_stream(_FLAG, args)
        if not has_places(args):
            found += _of_rows(args, slices)
        modules = getattr(args, "recompute_modules", None) or ()
        if getattr(args, "recompute_granularity", None) == "selective" and "moe_act" in modules:
            found.append(
                f"{_FLAG} with --recompute-modules moe_act: experts are computed one by one, without "
                "recomputation of their activation; use moe instead, or drop one of the two"
            )
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return that there is nothing to pipeline where a rank has one expert and one slice."""
        found = {}
        if items_of_layer(args) <= 1:
            found[_FLAG] = f"a rank has one expert and one slice of it; {_SLICES} 2 would cut it"
        if _apart(args) and expert_cuts(args) < 2:
            found[_APART] = "whole experts gather nothing beside exchanges"
        return found


def _of_rows(args: Any, slices: int) -> Sequence[str]:
    """Refuse what needs equal parts, where as many rows travel as there are."""
    found = []
    way = "add --moe-model-type deepspeed_moe (with --moe-no-drop, --moe-dynamic-padding too)"
    if slices > 1:
        found.append(
            f"{_SLICES} {slices} cuts the capacity of experts, and here each has as many rows as there are; "
            f"{way}, or drop it"
        )
    return found


def _apart(args: Any) -> bool:
    return bool(getattr(args, "pipe_experts_multi_stream", False))


def _slices(args: Any) -> int:
    return int(getattr(args, "pipe_experts_multi_data", 1))
