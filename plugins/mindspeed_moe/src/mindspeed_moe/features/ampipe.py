"""The declaration of attention and experts of different slices of a sequence beside one another."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_moe.expert_ranks import expert_cuts, expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import has_places

_DEGREE, _GATHERS = "--ampipe-degree", "--ampipe-tp-sp-comm-overlap"


class AttentionExpertsPipeline(Feature):
    """Rows of a slice of the sequence travel while the attention of the next slice is computed."""

    name = "moe-ampipe"
    family = "moe"
    summary = "Overlap all-to-all with attention and experts of other slices of the sequence"
    flags = (
        Flag(
            _DEGREE,
            type=int,
            default=1,
            help="Slices of the sequence whose attention, all-to-all and experts overlap.",
        ),
        Flag(_GATHERS, help="Overlap all-gathers of tensor-parallel experts with other slices too."),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no token travels"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="it is the all-to-all that is hidden",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        *(
            Conflict(feature=name, reason="it takes queries of a whole sequence; drop one of the two")
            for name in ("context-parallel", "packed-documents", "triangle-attn", "alibi", "alibi-tensor")
        ),
        *(
            Conflict(feature=name, reason="its experts belong to one call of a layer; drop one of the two")
            for name in ("moe-zero-memory", "moe-adaptive-recompute", "moe-balanced-experts")
        ),
        Conflict(
            feature="moe-fix-router",
            reason="routes that go by the number of a token are others for each slice; drop one of the two",
        ),
        Conflict(
            flag="--moe-expert-capacity-factor",
            reason="a capacity would be that of a slice, and other tokens dropped; drop one of the two",
        ),
        Conflict(
            flag="--moe-router-load-balancing-type",
            one_of=("sinkhorn",),
            reason="a slice would be balanced by itself, and go to other experts; drop one of the two",
        ),
        Conflict(
            flag="--moe-router-force-load-balancing",
            reason="losses would be those of other routes; drop one of the two",
        ),
        Conflict(
            flag="--moe-enable-routing-replay",
            reason="routes are recorded for all tokens of a call; drop one of the two",
        ),
        Conflict(
            flag="--attention-output-gate",
            reason="the gate multiplies the whole sequence; drop one of the two",
        ),
        Conflict(
            flag="--fine-grained-activation-offloading",
            reason="it moves tensors of whole modules; drop one of the two",
        ),
        Conflict(flag="--use-megatron-fsdp", reason="it frees weights between the calls of slices"),
    )
    slots = ("layer-schedule",)
    replaces_roles = ("layer",)
    packages = ("megatron-core>=0.16",)
    docs = "mindspeed_moe:docs/moe-ampipe.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    tuning = {_DEGREE: (1, 2)}
    affects_checkpoint = False
    verify = Proofs("mindspeed_moe.features.ampipe_proofs:AMPIPE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether there is more than one slice, or the option is given that needs them."""
        return getattr(args, "ampipe_degree", 1) != 1 or bool(
            getattr(args, "ampipe_tp_sp_comm_overlap", False)
        )

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse slices that do not divide the sequence, and layers that are not computed as a whole."""
        slices = args.ampipe_degree
        if slices == 1:
            return (f"{_GATHERS} is an option of {_DEGREE}; add that one with 2 or more, or drop it",)
        if slices < 1:
            return (f"{_DEGREE} {slices} is no number of slices; use 2 or more, or drop it",)
        found = list(shared_experts_on_a_stream(_DEGREE, args))
        if (ranks := expert_ranks(args)) < 2:
            found.append(
                f"{_DEGREE} {slices} with --expert-model-parallel-size {ranks} has no communication to hide; "
                "use 2 or more, or drop it"
            )
        length = getattr(args, "seq_length", None)
        parts = getattr(args, "tensor_model_parallel_size", 1) or 1
        parts = slices * (parts if getattr(args, "sequence_parallel", False) else 1)
        if length and length % parts:
            found.append(
                f"{_DEGREE} {slices} does not divide --seq-length {length}, which has to be a multiple of "
                f"{parts}: slices times the ranks that share a sequence"
            )
        if getattr(args, "recompute_granularity", None) == "selective":
            found.append(
                f"{_DEGREE} {slices} with --recompute-granularity selective: slices are parts of modules "
                "that would be computed again as a whole; use full, or drop one of the two"
            )
        if getattr(args, "moe_model_type", None) == "deepspeed_moe":
            found += _of_gate(slices, args)
        if args.ampipe_tp_sp_comm_overlap and expert_cuts(args) < 2:
            found.append(
                f"{_GATHERS} runs gathers of experts that are cut, and these are whole; use "
                "--tensor-model-parallel-size 2 or more with --sequence-parallel, without "
                "--expert-tensor-parallel-size 1, or drop it"
            )
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that dropout differs."""
        dropped = [
            f"--{name.replace('_', '-')}"
            for name in ("attention_dropout", "hidden_dropout")
            if getattr(args, name, 0)
        ]
        if not dropped:
            return ()
        return (f"{_DEGREE} draws what {' and '.join(dropped)} drops slice by slice: other numbers",)

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Place layers that are computed slice by slice."""
        spec = yield
        from mindspeed_moe.sliced.placement import place_sliced_layers

        return place_sliced_layers(session, spec, args.ampipe_degree)


def _of_gate(slices: int, args: Any) -> Sequence[str]:
    if has_places(args):
        return (
            f"{_DEGREE} {slices} with --moe-model-type deepspeed_moe: a capacity would be that of a slice, "
            "and other tokens dropped; add --moe-no-drop without --moe-dynamic-padding, or drop one of "
            "the two",
        )
    if getattr(args, "noisy_gate_policy", None) not in (None, "None") or args.moe_use_sinkhorn:
        return (
            f"{_DEGREE} {slices} with --noisy-gate-policy or --moe-use-sinkhorn: losses would be those of "
            "other routes; drop one of the two",
        )
    return ()
