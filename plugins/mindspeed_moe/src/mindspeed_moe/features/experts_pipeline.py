"""The declaration of cut experts whose rows are gathered group by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_core.feature import Conflict, Feature, Flag, Gain, Requirement, Resume, Scenario
from mindspeed_moe.expert_ranks import expert_cuts
from mindspeed_moe.features.core import ORDERS_COMMUNICATION, PLACED_LAYER
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2
from mindspeed_moe.features.shared_experts import shared_experts_on_a_stream
from mindspeed_moe.options import has_places

GROUPS = ("--moe-experts-pipeline-degree", "2")
_MODEL = (*MODEL, *SHARED)
_SEQUENTIAL = tuple(flag for flag in _MODEL if flag != "--moe-grouped-gemm")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_CAPACITY = ("--moe-expert-capacity-factor", "1.0")


def _as_without(
    name: str,
    *layout: str,
    model: tuple[str, ...] = _MODEL,
    ranks: int = 2,
    tolerance: float = 1e-5,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    both = (*model, *TP2, *layout)
    return Scenario(
        name, flags=(*both, *GROUPS), baseline=both, world_size=ranks, tolerance=tolerance, gains=gains
    )


EXPERTS_PIPELINE_PROOFS = (
    _as_without("tp2", gains=(Gain("sent_bytes", 1.0),)),
    _as_without("ep2", *EP2, ranks=4),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS, *EP2, ranks=4),
    _as_without("sequential-experts", model=_SEQUENTIAL),
    _as_without("bf16", *_BF16, tolerance=2e-2),
    _as_without("capacity", *_CAPACITY),
    _as_without("padded-capacity", *_CAPACITY, "--moe-pad-expert-input-to-capacity"),
    _as_without("recompute-full", *_FULL),
    _as_without("recompute-moe", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    _as_without("per-token-loss", "--calculate-per-token-loss"),
    Scenario(
        "one-process",
        flags=(*_MODEL, *TP2, *EP2, *GROUPS),
        baseline=_MODEL,
        world_size=4,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*_MODEL, *TP2, *_BOTH_OVERLAPS, *GROUPS),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_SHARDED), world_size=1, with_feature=False),
    ),
)


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
