"""The declaration of forward and backward passes side by side."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, dest_of, hookimpl
from mindspeed_moe.expert_ranks import expert_ranks
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.options import PAIRS, without_pairs

_FLAG = "--moe-fb-overlap"
_UNPERMUTED = ("--moe-unperm2-mem-optim", "--moe-unperm2-mem-optim-swap")
_RECOMPUTED = ("moe", "shared_experts")
_SCHEDULES = ("schedules_method", "pipeline_schedule", "pipeline_schedule_file")
"""Arguments of mindspeed-pp."""


class ForwardBackwardOverlap(Feature):
    """Tokens of one micro-batch travel while another one computes."""

    name = PAIRS
    family = "moe"
    summary = "Overlap all-to-all with the forward or backward of another micro-batch"
    flags = (
        Flag(_FLAG, help="Overlap all-to-all with the forward or backward of another micro-batch."),
        Flag(
            _UNPERMUTED[0],
            help="Accepted with --moe-fb-overlap, without effect: expert outputs are never saved.",
        ),
        Flag(
            _UNPERMUTED[1],
            help="Accepted with --moe-fb-overlap, without effect: expert outputs are never saved.",
        ),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no token travels"),
        Requirement(
            feature="grouped-experts",
            reason="weight gradients of all experts of a rank are computed at once; add --moe-grouped-gemm",
        ),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="it is the all-to-all that is hidden",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        Conflict(
            flag="--use-megatron-fsdp", reason="it frees weights between the products that are kept apart"
        ),
        Conflict(
            flag="--enable-autocast",
            reason="megatron-core's schedule of two micro-batches leaves it; use --bf16",
        ),
        Conflict(flag="--hybrid-context-parallel", reason="it has another schedule; keep one of the two"),
        Conflict(
            flag="--fine-grained-activation-offloading",
            reason="it expects the passes of a stage one after the other; keep one of the two",
        ),
    )
    slots = ("layer-schedule",)
    docs = "mindspeed_moe:docs/moe-fb-overlap.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    tuning = {_FLAG: (False, True)}
    verify = Proofs("mindspeed_moe.features.fb_overlap_proofs:FB_OVERLAP_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of the flags is given; the others need the first."""
        return any(_given(args, flag.name) for flag in cls.flags)

    @classmethod
    def idle(cls, args: Any) -> str:
        """Return that whole layers are recomputed, whose exchanges nothing could hide."""
        if _given(args, _FLAG) and getattr(args, "recompute_granularity", None) == "full":
            return (
                "--recompute-granularity full recomputes whole layers, whose all-to-all nothing hides; use "
                "selective, or --moe-zero-memory level0, for the overlap"
            )
        return ""

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse what there is nothing to overlap in, and parts of layers that are computed again."""
        alone = [flag for flag in _UNPERMUTED if _given(args, flag)]
        if not _given(args, _FLAG):
            return (f"{alone[0]} is an option of {_FLAG}; add that one, or drop both",)
        found = []
        size = expert_ranks(args)
        if size < 2:
            found.append(
                f"{_FLAG} with --expert-model-parallel-size {size} has no communication to hide; use 2 or "
                "more, or drop it"
            )
        stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
        if stages > 1 and not _interleaves(args, stages) and not _scheduled(args):
            found.append(without_pairs(stages))
        granularity = getattr(args, "recompute_granularity", None)
        modules = [name for name in getattr(args, "recompute_modules", None) or () if name in _RECOMPUTED]
        if granularity == "selective" and modules:
            found.append(
                f"{_FLAG} with --recompute-modules {modules[0]} computes again what two micro-batches take "
                "turns in; drop it from --recompute-modules, or use --moe-zero-memory level0"
            )
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return which flags have no effect."""
        return dict.fromkeys(_UNPERMUTED, "probabilities are applied before results of experts are sent back")

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return which flag of megatron-core has no effect."""
        if not getattr(args, "moe_shared_expert_overlap", False):
            return ()
        return ("--moe-shared-expert-overlap changes nothing, shared experts overlap in both directions",)

    @hookimpl(wrapper=True)
    def get_forward_backward(self, session: Any) -> Generator[None, Any, Any]:
        """Let the passes of two micro-batches take turns."""
        schedule = yield
        from mindspeed_moe.paired_schedule import paired

        return paired(session, schedule)


def _interleaves(args: Any, stages: int) -> bool:
    """Return whether ranks have several model chunks, as far as flags say; a layout says it later."""
    if getattr(args, "pipeline_model_parallel_layout", None):
        return True
    if (getattr(args, "virtual_pipeline_model_parallel_size", None) or 1) > 1:
        return True
    if (getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1) > 1:
        return True
    per_chunk: int = getattr(args, "num_layers_per_virtual_pipeline_stage", None) or 0
    layers: int = getattr(args, "num_layers", None) or 0
    return per_chunk > 0 and (not layers or layers // stages > per_chunk)


def _scheduled(args: Any) -> bool:
    """Return whether mindspeed-pp has a schedule to bring, which says itself whether it has pairs."""
    return any(getattr(args, dest, None) for dest in _SCHEDULES)


def _given(args: Any, flag: str) -> bool:
    return bool(getattr(args, dest_of(flag), False))
