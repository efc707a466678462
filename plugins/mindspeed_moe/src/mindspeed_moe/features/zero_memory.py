"""The declaration of experts that keep less for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement
from mindspeed_moe.features.core import PLACED_LAYER
from mindspeed_moe.features.proofs import ZERO_MEMORY_PROOFS
from mindspeed_moe.options import DISABLED, LEVEL0, LEVEL1

_FLAG, _LAYERS = "--moe-zero-memory", "--moe-zero-memory-num-layers"


class ZeroMemory(Feature):
    """Rows of experts are sent again in backward instead of being kept."""

    name = "moe-zero-memory"
    family = "moe"
    summary = "Rows and activations of experts sent or computed again in backward instead of being kept"
    flags = (
        Flag(
            _FLAG,
            type=str,
            default=DISABLED,
            choices=(DISABLED, LEVEL0, LEVEL1),
            help="Keep less of experts: level0 drops rows and activations, level1 the first product too.",
        ),
        Flag(
            _LAYERS,
            type=int,
            help="Do so in this many layers of a pipeline stage; the others drop activations only.",
        ),
    )
    requires = (
        PLACED_LAYER,
        Requirement(
            any_of=("moe-alltoall-overlap", "moe-fb-overlap"),
            reason="rows are sent again beside computation; add --moe-alltoall-overlap-comm or "
            "--moe-fb-overlap",
        ),
    )
    conflicts = (
        Conflict(flag="--moe-apply-probs-on-input", reason="rows are kept apart from their probabilities"),
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
    verify = ZERO_MEMORY_PROOFS

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
        granularity = getattr(args, "recompute_granularity", None)
        modules = [
            name for name in getattr(args, "recompute_modules", None) or () if name in ("moe", "moe_act")
        ]
        if granularity == "full":
            found.append(
                f"{_FLAG} {level} with --recompute-granularity full is redundant, experts are computed again "
                "anyway; drop one of the two"
            )
        elif granularity == "selective" and modules:
            found.append(
                f"{_FLAG} {level} with --recompute-modules {modules[0]} is redundant, both compute it again; "
                "drop one of the two"
            )
        return found
