"""The declaration of experts that keep less for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import DISABLED, LEVEL0, LEVEL1

_FLAG, _LAYERS = "--moe-zero-memory", "--moe-zero-memory-num-layers"

SENDING_LAYER = (
    PLACED_LAYER,
    Requirement(flag="--num-experts", reason="without experts no rows are kept"),
    Requirement(
        feature="grouped-experts",
        reason="the activations of all experts of a rank are computed again at once; add --moe-grouped-gemm",
    ),
    Requirement(
        flag="--moe-token-dispatcher-type",
        one_of=("allgather", "alltoall", "alltoall_seq"),
        reason="the flexible dispatcher communicates by kernels of its own",
    ),
)
"""Of features whose layer sends rows a second time."""
KEPT_APART = Conflict(
    flag="--moe-apply-probs-on-input", reason="rows are kept apart from their probabilities"
)
"""Of the same."""


class ZeroMemory(Feature):
    """Rows of experts are sent again in backward instead of being kept."""

    name = "moe-zero-memory"
    family = "moe"
    summary = "Resend or recompute expert activations in backward instead of saving them"
    flags = (
        Flag(
            _FLAG,
            type=str,
            default=DISABLED,
            choices=(DISABLED, LEVEL0, LEVEL1),
            help=(
                "Recompute in backward: level0 dispatched tokens and activations, level1 the first GEMM too."
            ),
        ),
        Flag(
            _LAYERS,
            type=int,
            help="Layers of a pipeline stage with that level; the others recompute activations only.",
        ),
    )
    requires = SENDING_LAYER
    conflicts = (
        KEPT_APART,
        ORDERS_COMMUNICATION,
        Conflict(
            feature="moe-pipe-experts",
            reason="its experts keep the results of each part; drop one of the two",
        ),
    )
    docs = "mindspeed_moe:docs/moe-zero-memory.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (DISABLED, LEVEL0, LEVEL1)}
    affects_checkpoint = False
    formulas = {
        # Of each row the first product and its probability; rows are those of evenly chosen experts.
        "activation_bytes": "(seq_length * micro_batch_size * moe_router_topk / (context_parallel_size "
        "* (tensor_model_parallel_size if sequence_parallel else 1)) * (element_size "
        "* (2 if swiglu else 1) * moe_ffn_hidden_size + 4)) if moe_zero_memory == 'level0' else 0"
    }
    verify = Proofs(
        "mindspeed_moe.features.proofs:ZERO_MEMORY_PROOFS",
        "mindspeed_moe.features.adaptive_proofs:OTHER_DISPATCHER_PROOFS",
    )

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a level is given, or a number of layers, which needs one."""
        level = getattr(args, "moe_zero_memory", None) or DISABLED
        return level != DISABLED or getattr(args, "moe_zero_memory_num_layers", None) is not None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse layers that there are not, and layers that are computed again as a whole."""
        found = []
        level, layers = args.moe_zero_memory, args.moe_zero_memory_num_layers
        if level == DISABLED:
            return (f"{_LAYERS} {layers} needs a level; add {_FLAG} {LEVEL0} or {LEVEL1}, or drop it",)
        stages = getattr(args, "pipeline_model_parallel_size", 1) or 1
        most = (getattr(args, "num_layers", 0) or 0) // stages
        if layers is not None and not 0 <= layers <= most:
            found.append(
                f"{_LAYERS} {layers} is no number of layers of a pipeline stage, which has {most}; use 0 to "
                f"{most}"
            )
        found += recomputed_already(f"{_FLAG} {level}", args)
        return [*found, *shared_experts_on_a_stream(f"{_FLAG} {level}", args)]

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Return that nothing hides what is sent again, where it is so."""
        return exposed_again(f"{_FLAG} {args.moe_zero_memory}", args)


def recomputed_already(given: str, args: Any) -> Sequence[str]:
    """Refuse recomputation of what experts compute again by themselves.

    Args:
        given: the flag of the feature, and its value.
        args: the arguments.
    """
    granularity = getattr(args, "recompute_granularity", None)
    modules = [name for name in getattr(args, "recompute_modules", None) or () if name in ("moe", "moe_act")]
    if granularity == "full":
        return (
            f"{given} with --recompute-granularity full is redundant, experts are computed again anyway; "
            "drop one of the two",
        )
    if granularity == "selective" and modules:
        return (
            f"{given} with --recompute-modules {modules[0]} is redundant, both compute it again; drop one of "
            "the two",
        )
    return ()


def exposed_again(given: str, args: Any) -> Sequence[str]:
    """Return a note where nothing is computed beside rows that are sent again.

    Args:
        given: the flag of the feature, and its value.
        args: the arguments.
    """
    overlapped = any(
        getattr(args, name, False) for name in ("moe_alltoall_overlap_comm", "moe_allgather_overlap_comm")
    )
    ranks = (getattr(args, "expert_model_parallel_size", 1) or 1) * (
        getattr(args, "tensor_model_parallel_size", 1) or 1
    )
    if overlapped or ranks == 1:
        return ()
    return (
        f"{given} sends rows again beside gradients of the experts only; "
        "--moe-alltoall-overlap-comm (or --moe-permutation-async-comm --moe-allgather-overlap-comm) hides "
        "more of it",
    )
