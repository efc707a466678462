"""The declaration of cut experts whose rows are gathered group by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Requirement
from mindspeed_moe.expert_ranks import expert_cuts
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.experts_pipeline_proofs import EXPERTS_PIPELINE_PROOFS
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import has_places

_FLAG = "--moe-experts-pipeline-degree"


class ExpertsPipeline(Feature):
    """Rows of a group of experts are gathered while another group is computed."""

    name = "moe-experts-pipeline"
    family = "moe"
    summary = "Overlap gathers and scatters of tensor-parallel experts with other experts"
    flags = (
        Flag(
            _FLAG,
            type=int,
            default=0,
            help="Groups of a rank's experts, each computed while another's tokens are gathered.",
        ),
    )
    requires = (
        PLACED_LAYER,
        Requirement(flag="--num-experts", reason="without experts no row is gathered"),
        Requirement(
            flag="--moe-token-dispatcher-type",
            one_of=("alltoall", "alltoall_seq"),
            reason="other dispatchers gather the rows of all experts at once",
        ),
    )
    conflicts = (
        ORDERS_COMMUNICATION,
        *(
            Conflict(flag=flag, reason="rows are sorted for all experts at once; drop one of the two")
            for flag in ("--use-fused-moe-token-permute-and-unpermute", "--moe-permute-fusion")
        ),
        *(
            Conflict(feature=name, reason="its experts keep the results of each group; drop one of the two")
            for name in ("moe-zero-memory", "moe-adaptive-recompute")
        ),
        Conflict(
            flag="--moe-apply-probs-on-input",
            reason="probabilities multiply activations of experts; drop one of the two",
        ),
        Conflict(
            flag="--gemm-gradient-accumulation-fusion",
            reason="weight gradients of experts are computed group by group; drop one of the two",
        ),
        Conflict(
            flag="--use-megatron-fsdp", reason="it frees weights between the products that are kept apart"
        ),
    )
    slots = ("layer-schedule",)
    docs = "mindspeed_moe:docs/moe-experts-pipeline.md"
    fake_tensors = True
    deterministic = True
    tuning = {_FLAG: (0, 2)}
    affects_checkpoint = False
    verify = EXPERTS_PIPELINE_PROOFS

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a number of groups is given."""
        return bool(getattr(args, "moe_experts_pipeline_degree", 0))

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse numbers that do not divide a rank's experts, and experts that are not cut."""
        found = list(shared_experts_on_a_stream(_FLAG, args))
        groups = args.moe_experts_pipeline_degree
        experts = (getattr(args, "num_experts", None) or 1) // (
            getattr(args, "expert_model_parallel_size", None) or 1
        )
        if groups < 2 or experts % groups:
            found.append(
                f"{_FLAG} {groups} does not divide the {experts} experts of a rank into several groups of "
                "equal size; use a divisor from 2 on, or drop it"
            )
        if expert_cuts(args) < 2:
            found.append(
                f"{_FLAG} {groups} gathers rows of experts that are cut, and these are whole; use "
                "--tensor-model-parallel-size 2 or more with --sequence-parallel, without "
                "--expert-tensor-parallel-size 1 and --moe-tp-extend-ep, or drop it"
            )
        if has_places(args):
            found.append(
                f"{_FLAG} {groups} with --moe-model-type deepspeed_moe, whose experts have places: "
                "--use-pipe-experts pipelines those; use it, or drop one of the two"
            )
        modules = getattr(args, "recompute_modules", None) or ()
        if getattr(args, "recompute_granularity", None) == "selective" and "moe_act" in modules:
            found.append(
                f"{_FLAG} {groups} with --recompute-modules moe_act: experts are computed group by group, "
                "without recomputation of their activation; use moe instead, or drop one of the two"
            )
        return found
