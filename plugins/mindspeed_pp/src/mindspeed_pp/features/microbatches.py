"""The declaration of micro-batches of different numbers of samples."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_core.feature import Conflict, Feature, Flag, Requirement, Resume, Scenario, hookimpl
from mindspeed_pp.asked import (
    INDEX_FLAG,
    LIST_FLAG,
    MANUAL_FLAG,
    OPTIMIZED_FLAG,
    ORDERS_FLAG,
    PERF_FLAG,
    SWITCH_FLAG,
    one_stage,
)
from mindspeed_pp.features.engine import plan_of
from mindspeed_pp.features.proofs import scheduled

_PP2 = ("--pipeline-model-parallel-size", "2")
_BATCH = ("--micro-batch-size", "2", "--global-batch-size", "12")
_WHOLE = ("--micro-batch-size", "12", "--global-batch-size", "12")
_LIST = ("--optimized-mbs-list", "1,2,3,3,2,1")
_HALF = ("--optimized-mbs-list", "1,2,2,1")


def as_one(name: str, *flags: str, model: tuple[str, ...] = (), ranks: int = 2) -> Scenario:
    """Compare a list with one process and the whole batch at once.

    The tolerance is rounding's: the whole batch is one sum, a list has one of each micro-batch and one over
    them. In float64 the two differ by 1e-15.
    """
    return Scenario(
        name,
        flags=(*_PP2, *_BATCH, *flags, *model),
        baseline=(*_WHOLE, *model),
        world_size=ranks,
        baseline_world_size=1,
        tolerance=1e-5,
    )


MICROBATCH_PROOFS = (
    as_one("list", *_LIST),
    as_one("zbv", *_LIST, *scheduled("zbv"), model=("--untie-embeddings-and-output-weights",)),
    as_one("per-token", *_LIST, model=("--calculate-per-token-loss",)),
    as_one("searched", "--automated-pipeline-perf", "--micro-batch-size", "3"),
    as_one("manual", "--optimized-pipeline", "--manual-mbs", "1,3,4,3,1"),
    as_one("dp2", *_HALF, "--use-distributed-optimizer", "--overlap-grad-reduce", ranks=4),
    as_one("tp2", *_LIST, "--tensor-model-parallel-size", "2", "--sequence-parallel", ranks=4),
    as_one(
        "orders",
        *_LIST,
        "--pp-schedule-list",
        '{"stage0": ["F0", "F1", "F2", "B0", "F3", "B1", "F4", "B2", "F5", "B3", "B4", "B5"], '
        '"stage1": ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", "F4", "B4", "F5", "B5"]}',
    ),
    Scenario(
        "resume",
        flags=(*_PP2, *_BATCH, *_LIST),
        world_size=2,
        resume=Resume(flags=_WHOLE, world_size=1, with_feature=False),
    ),
)


WEIGHTING_FLAG = "--no-dpp-loss-weighting"


class MicrobatchSizes(Feature):
    """Small micro-batches first and last, where the pipeline fills and drains."""

    name = "pp-microbatches"
    family = "pipeline-parallelism"
    summary = "Use smaller micro-batches while the pipeline fills and drains"
    flags = (
        Flag(PERF_FLAG, help="Search the micro-batch sizes with the shortest simulated step."),
        Flag(LIST_FLAG, type=str, metavar="SIZES", help="Samples of each micro-batch of a step: 1,2,3,2."),
        Flag(
            ORDERS_FLAG,
            type=str,
            metavar="JSON",
            help='The passes of each pipeline rank: {"stage0": ["F0", "B0"], ...}.',
        ),
        Flag(SWITCH_FLAG, inverts="optimized_mbs_mode", help="Train with equal micro-batches all the same."),
        Flag(INDEX_FLAG, type=int, help="Accepted: the schedule knows which micro-batch it runs."),
        Flag(OPTIMIZED_FLAG, help="Take the sizes of micro-batches from --manual-mbs."),
        Flag(
            MANUAL_FLAG,
            type=str,
            metavar="SIZES",
            help="As --optimized-mbs-list, or example-config-1 or example-config-2.",
        ),
        Flag(
            WEIGHTING_FLAG,
            inverts="dpp_loss_weighting",
            help="Weight micro-batches equally, whatever their size.",
        ),
        Flag(
            "--dpp-loss-weighting",
            default=True,
            help="Weight micro-batches by their samples (the default).",
        ),
    )
    requires = (Requirement(feature="pp-engine", reason="it runs micro-batches of different size"),)
    conflicts = (
        Conflict(flag="--rampup-batch-size", reason="a list is for one batch size; drop one of the two"),
        Conflict(
            flag="--step-batch-size-schedule", reason="a list is for one batch size; drop one of the two"
        ),
        Conflict(flag="--variable-seq-lengths", reason="samples of different lengths cannot be put together"),
    )
    # The sizes are known before the engine checks its schedule.
    after = ("pp-engine",)
    docs = "mindspeed_pp:docs/pp-microbatches.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        # Across one border of stages, both ways, whatever the list.
        "bytes_sent_of_step": "2 * element_size * hidden_size * seq_length * global_batch_size "
        "/ (data_parallel_size * context_parallel_size "
        "* (tensor_model_parallel_size if sequence_parallel else 1))",
    }
    verify = MICROBATCH_PROOFS

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether one of the flags is given."""
        dests = (
            *("automated_pipeline_perf", "optimized_mbs_list", "pp_schedule_list"),
            *("optimized_pipeline", "manual_mbs"),
        )
        return any(getattr(args, dest, None) for dest in dests) or getattr(args, "mbs_idx", None) is not None

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse flags that do not go together, and lists that cannot be read."""
        from mindspeed_pp.microbatch_list import given_list
        from mindspeed_pp.plan import asked_rule

        given = lambda dest: getattr(args, dest, None)  # noqa: E731
        if found := list(one_stage(args)):
            return found
        if given("optimized_pipeline") and not given("manual_mbs"):
            found.append(f"{OPTIMIZED_FLAG} without sizes: add {MANUAL_FLAG} 1,2,3,2")
        if given("manual_mbs") and not given("optimized_pipeline"):
            found.append(f"{MANUAL_FLAG} {args.manual_mbs}: add {OPTIMIZED_FLAG}, which takes it")
        try:
            listed = given_list(args)
            asked_rule(args)
        except UserError:
            # The engine says what is wrong with it.
            return found
        if (given("context_parallel_size") or 1) > 1:
            found.append(
                f"--context-parallel-size {args.context_parallel_size} with micro-batches of different size: "
                "it counts samples of equal ones; drop one of the two"
            )
        unweighted = not getattr(args, "dpp_loss_weighting", True) and not given("calculate_per_token_loss")
        if listed is not None and len(set(listed[1])) > 1 and unweighted:
            found.append(
                f"{WEIGHTING_FLAG} with {listed[0]} of different sizes: samples of small micro-batches "
                "would count more; drop it, or add --calculate-per-token-loss"
            )
        index = given("mbs_idx")
        if index is not None and (listed is None or not 0 <= index < len(listed[1])):
            found.append(f"{INDEX_FLAG} {index}: it counts the micro-batches of {LIST_FLAG}; drop it")
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return lists that are switched off, and an index that nobody needs."""
        found = {INDEX_FLAG: "the schedule knows which micro-batch it runs"}
        if not getattr(args, "optimized_mbs_mode", True):
            equal = f"micro-batches have equal size with {SWITCH_FLAG}"
            found |= dict.fromkeys((LIST_FLAG, MANUAL_FLAG, OPTIMIZED_FLAG, PERF_FLAG), equal)
        return found

    @hookimpl(wrapper=True)
    def validate_arguments(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Check the list against the batch, or search one."""
        from mindspeed_pp.microbatch_list import check_sum, given_list, sizes_of

        given = yield
        if session.host.name == "megatron-lm" and given.tensor_model_parallel_size > 1:
            raise UserError(
                f"{LIST_FLAG} with --tensor-model-parallel-size {given.tensor_model_parallel_size}: "
                "Megatron-LM's tensor-parallel ranks receive micro-batches of --micro-batch-size; use "
                "mindspeed-train, or 1"
            )
        batch, size = getattr(given, "global_batch_size", None), getattr(given, "micro_batch_size", None)
        if not batch or not size:
            return given
        own = batch // (getattr(given, "data_parallel_size", None) or 1)
        listed = given_list(given)
        if listed is None and getattr(given, "automated_pipeline_perf", False):
            given.optimized_mbs_list = ",".join(map(str, self._searched(given, own // size, size)))
        elif listed is not None and sizes_of(given):
            check_sum(listed[0], listed[1], own)
        return given

    @hookimpl(wrapper=True)
    def get_forward_backward(self, args: Any) -> Generator[None, Any, Any]:
        """Refuse to train without the sizes that were asked for, where no flag says the batch."""
        dests = ("optimized_mbs_list", "manual_mbs", "pp_schedule_list")
        if getattr(args, "automated_pipeline_perf", False) and not any(getattr(args, d, None) for d in dests):
            raise UserError(
                f"{PERF_FLAG}: no --global-batch-size says how many samples a step has, so no sizes are "
                f"searched; give {LIST_FLAG}"
            )
        return (yield)

    def _searched(self, args: Any, microbatches: int, size: int) -> tuple[int, ...]:
        from mindspeed_pp.list_search import shortest_list
        from mindspeed_pp.plan import times_of

        plan = plan_of(args)
        if plan.rule.name != "1f1b":
            raise ArgumentError(
                PERF_FLAG,
                None,
                f"sizes are searched for 1f1b, and the schedule is {plan.rule.name}",
                f"give {LIST_FLAG}, or use 1f1b",
            )
        return shortest_list(plan.ranks, microbatches, size, times_of(args))
