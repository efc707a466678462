"""The declaration of recomputation without the communication that nobody needs."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_tp.features.core import PLANNED
from mindspeed_tp.features.formulas import RECOMPUTED
from mindspeed_tp.options import RECOMPUTE

_LEVEL = "--optimize-recomp-communication-level"
_STATUS = "--optimize-recomp-communication-status"
_GATHERED = "--no-recompute-comm-save-gathered"


class RecomputeCommunication(Feature):
    """Layers are computed again in segments that end before a sum over ranks."""

    name = RECOMPUTE
    family = "tp"
    summary = "Skip tensor-parallel communication that full recomputation does not need"
    flags = (
        Flag(
            _LEVEL,
            type=int,
            default=0,
            choices=(0, 1, 2),
            aliases=("--optimize-recompute-communication-level",),
            help="Skip all-reduces in recomputed layers: 1 in the MLP, 2 in attention too.",
        ),
        Flag(_STATUS, type=int, default=0, choices=(0, 1, 2), help=f"Former name of {_LEVEL}."),
        Flag(
            _GATHERED,
            inverts="recompute_comm_save_gathered",
            help="Gather the input of a recomputed linear layer again for its weight gradient.",
        ),
        Flag("--recompute-comm-save-gathered", help="Default; accepted for clarity.", dest="_saves_gathered"),
    )
    before = ("tp-2d", "unaligned-linear", "moe-core")
    requires = (
        PLANNED,
        Requirement(
            flag="--recompute-granularity",
            equals="full",
            reason="it is full recomputation whose communication it saves; add --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
        ),
    )
    conflicts = (
        Conflict(
            flag="--distribute-saved-activations",
            reason="inputs of segments are saved whole; drop one of the two",
        ),
        Conflict(
            flag="--fine-grained-activation-offloading",
            reason="it moves activations that are not kept; drop one of the two",
        ),
        Conflict(
            flag="--cuda-graph-impl",
            one_of=("local", "transformer_engine"),
            reason="segments end inside a captured layer",
        ),
    )
    slots = ("recompute-policy",)
    docs = "mindspeed_tp:docs/recompute-comm.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        "bytes_sent": RECOMPUTED,
        # A layer keeps the inputs of its two segments.
        "activation_bytes": "2 * element_size * hidden_size * seq_length * micro_batch_size / "
        "(context_parallel_size * (tensor_model_parallel_size if sequence_parallel else 1))",
    }
    tuning = {_LEVEL: (0, 1, 2)}
    verify = Proofs("mindspeed_tp.features.proofs:RECOMPUTE_PROOFS")

    @classmethod
    def presets(cls, args: Any) -> Mapping[str, Any]:
        """Return the level that the former name gives."""
        level = getattr(args, "optimize_recomp_communication_status", 0)
        return {"optimize_recomp_communication_level": level} if level else {}

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return what has no effect where there is no communication to leave out, or nothing is gathered."""
        if args.tensor_model_parallel_size == 1:
            alone = "there is no communication to leave out with --tensor-model-parallel-size 1"
            return dict.fromkeys((_LEVEL, _STATUS, _GATHERED), alone)
        if not args.sequence_parallel and not getattr(args, "tp_2d", False):
            return {_GATHERED: "inputs are gathered with --sequence-parallel only"}
        return {}

    @hookimpl(wrapper=True)
    def build_transformer_config(self) -> Generator[None, Any, Any]:
        """Keep megatron-core from recomputing whole layers."""
        config = yield
        config.recompute_granularity = None
        config.recompute_method = config.recompute_num_layers = None
        return config

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Place the layers."""
        spec = yield
        from mindspeed_tp.placement import place_segments
        from mindspeed_tp.segments import SegmentOptions

        level = args.optimize_recomp_communication_level
        segments = SegmentOptions(level == 2, True, args.recompute_comm_save_gathered)
        some = args.recompute_num_layers if args.recompute_method == "block" else None
        return place_segments(session, spec, segments, some)
