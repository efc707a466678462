"""The declaration of the engine: pipeline schedules that are data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, TakeOver, hookimpl
from mindspeed_pp.asked import (
    AUTO,
    BUILT_IN,
    FILE_FLAG,
    FLAG,
    GREEDY,
    IN_ADVANCE,
    LIMIT_FLAG,
    NATIVE_ORDER,
    PAIRED_FLAG,
    PROFILE_FLAG,
    PROFILE_STEPS_FLAG,
    TIMES_FLAG,
    TIMES_FROM_FLAG,
    WEIGHTS_FLAG,
    asked_for,
    message_timeout,
    one_stage,
    pairs_asked,
    recompute_flag,
    said_chunks,
)

if TYPE_CHECKING:
    from mindspeed_core.run import ChunkPlace
    from mindspeed_pp.plan import Plan

ENGINE = "pp-engine"
_STREAMS, _WARM_UP = "--use-multi-stream", "overlap_warmup_cooldown_communication"
_SWAP, _DETACH = "--use-nanopipe-swap", "--dualpipev-dw-detach"
_WITHOUT_TIMES = set(BUILT_IN) - {"list", "chimera"}
"""Schedules whose order does not depend on the times of passes."""
RECOMPUTE_FLAG = "--pipeline-recompute"
_AUTOGRAD = "its hooks expect the order of autograd; drop one of the two"

_BETTER = {
    "nanopipe": "zbi has the same placement, a smaller bubble and keeps fewer micro-batches",
    "fold-aiao": "interleaved with --overlap-grad-reduce takes as long and keeps fewer micro-batches",
    "fold-fifo": "interleaved with --overlap-grad-reduce reduces gradients bucket by bucket",
    "dualpipev": "passes of a pair run one after the other without --moe-fb-overlap; zbv keeps fewer then",
    "chimera": "zbv has a smaller bubble for more than a few micro-batches, and holds the weights once",
}
"""Schedules to use instead of those that others dominate."""


def plan_of(args: Any) -> Plan:
    """Return the plan of arguments that ask for a schedule.

    Raises:
        UserError: they cannot be followed.
    """
    from mindspeed_pp.plan import planned

    plan = planned(args)
    assert plan is not None
    return plan


class PipelineSchedule(Feature):
    """Any schedule through one executor."""

    name = ENGINE
    family = "pipeline-parallelism"
    summary = "Run pipeline schedules as data: zero-bubble, V-shaped, interleaved, or yours"
    flags = (
        Flag(
            FLAG,
            type=str,
            choices=(AUTO, *BUILT_IN),
            choices_from="pp.schedules",
            help="Order of forward and backward passes over pipeline stages.",
        ),
        Flag(FILE_FLAG, type=str, metavar="FILE", help="File with the order of every pipeline rank."),
        Flag(
            WEIGHTS_FLAG,
            type=str,
            default="schedule",
            choices=("schedule", GREEDY),
            help="Weight gradients where the schedule puts them, or where ranks would wait.",
        ),
        Flag(
            TIMES_FLAG,
            type=float,
            nargs=3,
            metavar="TIME",
            help="Times of forward, input gradient and weight gradient of a rank's layers, in any unit.",
        ),
        Flag(LIMIT_FLAG, type=float, help="Most micro-batches whose activations a pipeline rank may store."),
        Flag(
            RECOMPUTE_FLAG,
            help=(
                "Save only inputs of pipeline stages, and recompute forward while gradients are in transit."
            ),
        ),
        Flag(
            PROFILE_FLAG,
            type=str,
            metavar="FILE",
            help="Measure the actions of some batches; write times and a Perfetto timeline to FILE.",
        ),
        Flag(PROFILE_STEPS_FLAG, type=int, default=3, help="Batches that --profile-pipeline measures."),
        Flag(
            TIMES_FROM_FLAG,
            type=str,
            metavar="FILE",
            help="Times that --profile-pipeline wrote, in place of --pipeline-times.",
        ),
        Flag("--use-nanopipe", help=f"The same as {FLAG} nanopipe."),
        Flag(_SWAP, help="nanopipe: offload operands of late weight gradients to host memory."),
        Flag(
            "--schedules-method",
            type=str,
            choices=("dualpipev", "chimera"),
            help=f"The same as {FLAG}.",
        ),
        Flag(_DETACH, help="dualpipev: leave the last weight gradients to the end."),
        Flag(
            "--foldx-mode",
            type=str,
            choices=("aiao", "fifo"),
            aliases=("--fold-mode",),
            help=f"The same as {FLAG} fold-aiao or fold-fifo.",
        ),
        *(
            Flag(flag, help="Use megatron-core's order with one communicator per direction.")
            for flag in NATIVE_ORDER
        ),
        Flag(_STREAMS, help="Accepted with --overlap-warmup-cooldown-communication."),
    )
    requires = (
        Requirement(flag="--pipeline-model-parallel-size", reason="a schedule orders pipeline stages"),
    )
    conflicts = (
        Conflict(flag="--use-torch-fsdp2", reason=_AUTOGRAD),
        Conflict(flag="--use-megatron-fsdp", reason=_AUTOGRAD),
        Conflict(
            flag="--num-microbatches-with-partial-activation-checkpoints",
            reason="it counts micro-batches of megatron-core's own schedules; use one of those",
        ),
        Conflict(
            flag="--fine-grained-activation-offloading",
            reason="it expects megatron-core's order of micro-batches; drop one of the two",
        ),
        Conflict(
            flag="--defer-embedding-wgrad-compute",
            reason="only megatron-core's schedules compute the output layer's weight gradient at the end",
        ),
        Conflict(flag="--hybrid-context-parallel", reason="it has another schedule; keep one of the two"),
    )
    takes_over = tuple(
        TakeOver(name, "the schedule computes stages again before their backward passes")
        for name in ("recompute-in-advance", "recompute-in-bubble")
    )
    slots = ("pipeline-schedule", "pp-transport")
    docs = "mindspeed_pp:docs/pp-engine.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    tuning = {FLAG: ("1f1b", "zb-h1")}
    verify = Proofs("mindspeed_pp.features.proofs:ENGINE_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a schedule is asked for, by any of the flags."""
        return bool(asked_for(args))

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse sizes that the schedule does not go with."""
        ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
        asked = next(iter(asked_for(args)))
        if ranks < 2:
            # Features whose flags ask for the engine say so themselves.
            return one_stage(args) if asked.partition(" ")[0] in {flag.name for flag in cls.flags} else ()
        if getattr(args, "use_multi_stream", False) and not getattr(args, _WARM_UP, False):
            return (
                f"{_STREAMS} is an option of --overlap-warmup-cooldown-communication; add it, or drop both",
            )
        measured = getattr(args, "profile_pipeline_steps", 3)
        if measured < 1:
            return (f"{PROFILE_STEPS_FLAG} {measured}: measure 1 or more, or drop {PROFILE_FLAG}",)
        try:
            plan = plan_of(args)
        except UserError as error:
            return (str(error),)
        if plan.swaps_operands and plan.rule.name != "nanopipe":
            return (f"{_SWAP} with {asked}: it is an option of --use-nanopipe; add that one, or drop it",)
        if plan.swaps_operands and plan.moves_weights:
            return (
                f"{_SWAP} and {WEIGHTS_FLAG} {GREEDY} both move what belongs to weight gradients; drop one",
            )
        refused = plan.refusal(None)
        if refused:
            return (f"{asked}: {refused}",)
        if plan.sizes and pairs_asked(args):
            return (
                f"{PAIRED_FLAG} with micro-batches of different size: megatron-core keeps one scale of the "
                "losses of experts, and the two passes of a pair would need two; drop one of the two",
            )
        balancing = getattr(args, "moe_router_load_balancing_type", None)
        if plan.recomputes and "global_aux_loss" in (
            balancing if isinstance(balancing, list) else [balancing]
        ):
            return (
                f"{recompute_flag(args)} with --moe-router-load-balancing-type global_aux_loss: it sums the "
                "tokens of micro-batches up to now, and those that are computed again come in another order; "
                "use aux_loss, or drop one of the two",
            )
        placement = plan.placement
        if placement.size != ranks:
            return (
                f"{asked}: it is for {placement.size} pipeline ranks, and --pipeline-model-parallel-size is "
                f"{ranks}; change one of the two",
            )
        found = [] if placement.is_loop else list(_placed_elsewhere(args, asked, placement.depth))
        if getattr(args, "pipeline_w_placement", None) == GREEDY and not plan.rule.splits:
            found.append(
                f"{WEIGHTS_FLAG} {GREEDY} with {asked}: it computes no weight gradients apart; use zb-h1, "
                "zbi or zbv, or drop it"
            )
        return found

    @classmethod
    def unread(cls, args: Any) -> Mapping[str, str]:
        """Return options that belong to another schedule, or to a flag that is not given."""
        plan, found = plan_of(args), {}
        rule, asked = plan.rule.name, next(iter(asked_for(args)))
        if rule != "dualpipev":
            found[_DETACH] = f"it is an option of dualpipev, and the schedule is {rule}"
        if not getattr(args, "profile_pipeline", None):
            found[PROFILE_STEPS_FLAG] = f"nothing is measured without {PROFILE_FLAG}"
        if asked not in NATIVE_ORDER:
            each = f"{asked} has a communicator for each direction anyway"
            found |= dict.fromkeys((*NATIVE_ORDER, _STREAMS), each)
        searched = getattr(args, "automated_pipeline_perf", False)
        chosen = searched or asked.endswith(f" {AUTO}")
        if not (plan.moves_weights or chosen) and rule in _WITHOUT_TIMES:
            timed = (
                f"the order of {rule} does not depend on times; {FLAG} {AUTO} and {WEIGHTS_FLAG} {GREEDY} "
                "read them"
            )
            found |= {TIMES_FLAG: timed, TIMES_FROM_FLAG: timed}
        return found

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Say which schedule trains, and which one the simulator finds shorter."""
        from mindspeed_pp.plan import asked_rule

        rule = asked_rule(args)
        assert rule is not None
        better = None if pairs_asked(args) else _BETTER.get(rule.name)
        asked = next(iter(asked_for(args)))
        said = [] if asked.endswith(f" {rule.name}") else [f"{asked}: the pipeline schedule is {rule.name}"]
        return [*said, f"{asked}: {better}"] if better else said

    @hookimpl(wrapper=True)
    def validate_arguments_early(self, args: Any) -> Generator[None, Any, Any]:
        """Cut the model into as many chunks as the schedule has where no flag says it."""
        from mindspeed_pp.plan import asked_rule

        given = yield
        rule = asked_rule(given)
        assert rule is not None
        if said_chunks(given) is None and rule.chunks is not None and rule.chunks > 1:
            given.num_virtual_stages_per_pipeline_rank = rule.chunks
        return given

    @hookimpl(wrapper=True)
    def validate_arguments(self, args: Any) -> Generator[None, Any, Any]:
        """Refuse schedules that cannot run with the batch."""
        from mindspeed_pp.lint import lint
        from mindspeed_pp.named import functions_of
        from mindspeed_pp.plan import without_pairs

        validated = yield
        plan = plan_of(validated)
        count = plan.count(getattr(validated, "num_microbatches", None))
        refused = plan.refusal(count)
        if refused:
            raise UserError(f"{FLAG} {plan.rule.name}: {refused}")
        if count is not None:
            schedule = plan.schedule(count)
            lint(schedule, plan.limit)
            functions_of(schedule)
            if pairs_asked(validated) and (lone := without_pairs(schedule)):
                raise UserError(lone)
        return validated

    @hookimpl(wrapper=True)
    def process_group_options(self, args: Any) -> Generator[None, Any, Any]:
        """Name the rank that holds both embedding and output layer."""
        options = yield
        plan = plan_of(args)
        if plan.placement.loss_rank != 0 and plan.placement.copies == 1:
            return options
        from mindspeed_pp.tied_embeddings import first_rank

        return {**options, "get_embedding_ranks": first_rank}

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any) -> Generator[None, Any, Any]:
        """Create a group for each direction between pipeline ranks."""
        pg = yield
        from mindspeed_pp.mail import DOWN, UP

        timeout = message_timeout(session.args)
        for name in (UP, DOWN):
            session.groups.split(name, pg.pp, [list(range(pg.pp.size()))], timeout=timeout)
        return pg

    @hookimpl
    def place_chunks(self, args: Any, pp_rank: int, pp_size: int) -> tuple[ChunkPlace, ...] | None:
        """Place chunks where the schedule wants them."""
        from mindspeed_pp.plan import planned

        plan = planned(args)
        if plan is None or plan.placement.is_loop or pp_size != plan.ranks:
            return None
        from mindspeed_core.run import ChunkPlace

        placement = plan.placement
        return tuple(
            ChunkPlace(
                chunk if plan.chunks > 1 else None,
                placement.position(stage),
                placement.is_first(stage),
                placement.is_last(stage),
            )
            for chunk, stage in enumerate(placement.held[pp_rank])
        )

    @hookimpl(wrapper=True)
    def build_transformer_config(self, args: Any) -> Generator[None, Any, Any]:
        """Put the layers of each stage where the schedule wants the stage."""
        config = yield
        plan = plan_of(args)
        if getattr(args, IN_ADVANCE, False):
            # The schedule computes whole stages again, in the place of their layers.
            config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None
        if not plan.placement.is_loop:
            from mindspeed_pp.placed_layout import placed

            config.pipeline_model_parallel_layout = placed(config, plan.placement)
        return config

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, pg: Any) -> Generator[None, Any, Any]:
        """Let embedding and output layer of one rank share their weight where they are tied."""
        chunks = yield
        from mindspeed_pp.tied_embeddings import share_embedding

        share_embedding(session, chunks, pg, self.name)
        return chunks

    @hookimpl
    def get_forward_backward(self, args: Any, config: Any, pg: Any, run: Any) -> Callable[..., Any]:
        """Return the schedule."""
        plan = plan_of(args)
        from mindspeed_pp.engine import Engine

        return Engine(run, args, config, pg, plan)


def _placed_elsewhere(args: Any, asked: str, stages: int) -> Sequence[str]:
    """Refuse what needs stages that run down the ranks."""
    found = []
    layers = getattr(args, "num_layers", None)
    laid_out = any(
        getattr(args, dest, None)
        for dest in ("pipeline_model_parallel_layout", "pipeline_num_transformer_layers", "num_layer_list")
    )
    if layers and not laid_out and layers % stages:
        found.append(
            f"{asked} cuts the model into {stages} stages, and --num-layers {layers} is no multiple; change "
            "it, or give --pipeline-model-parallel-layout"
        )
    for dest in (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ):
        if getattr(args, dest, None):
            flag = "--" + dest.replace("_", "-")
            found.append(
                f"{flag} with {asked}: first and last stage are on one rank; use "
                "--pipeline-model-parallel-layout"
            )
    return found
