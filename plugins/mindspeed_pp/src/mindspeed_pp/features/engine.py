"""The declaration of the engine: pipeline schedules that are data."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Conflict, Feature, Flag, Requirement, hookimpl
from mindspeed_core.run import ChunkPlace
from mindspeed_pp.features.proofs import ENGINE_PROOFS
from mindspeed_pp.plan import FLAG, asked_rule, chunks_of, planned
from mindspeed_pp.schedules import BUILT_IN

ENGINE = "pp-engine"


class PipelineSchedule(Feature):
    """Any schedule through one executor."""

    name = ENGINE
    family = "pipeline parallelism"
    summary = "Pipeline schedules as data: zero-bubble, V-shaped, interleaved, or one of your own"
    flags = (
        Flag(
            FLAG,
            type=str,
            choices=tuple(rule.name for rule in BUILT_IN),
            choices_from="pp.schedules",
            help="Order of forward and backward passes over pipeline stages.",
        ),
    )
    requires = (
        Requirement(
            flag="--pipeline-model-parallel-size", reason="a schedule is an order of pipeline stages"
        ),
    )
    conflicts = (
        Conflict(
            flag="--use-torch-fsdp2", reason="its hooks expect the order of autograd; drop one of the two"
        ),
        Conflict(
            flag="--use-megatron-fsdp", reason="its hooks expect the order of autograd; drop one of the two"
        ),
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
    slots = ("pipeline-schedule", "pp-transport")
    docs = "mindspeed_pp:docs/pp-engine.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    tuning = {FLAG: ("1f1b", "zb-h1")}
    verify = ENGINE_PROOFS

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether a schedule is asked for, built in or not."""
        return bool(getattr(args, "pipeline_schedule", None))

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse sizes that the schedule does not go with."""
        try:
            rule = asked_rule(args)
        except UserError as error:
            return (str(error),)
        assert rule is not None
        ranks = getattr(args, "pipeline_model_parallel_size", 1) or 1
        if ranks < 2:
            return (
                f"{FLAG} {rule.name} with --pipeline-model-parallel-size {ranks}: use 2 or more, or drop it",
            )
        refused = rule.refusal(ranks, chunks_of(args, rule), None)
        found = [f"{FLAG} {rule.name}: {refused}"] if refused else []
        placement = rule.place(ranks, chunks_of(args, rule))
        if not placement.is_loop:
            found += _placed_elsewhere(args, rule.name)
        return found

    @hookimpl(wrapper=True)
    def validate_arguments_early(self, args: Any) -> Generator[None, Any, Any]:
        """Cut the model into as many chunks as the schedule has where no flag says it."""
        given = yield
        rule = asked_rule(given)
        assert rule is not None
        unsaid = not any(
            getattr(given, name, None)
            for name in (
                "num_virtual_stages_per_pipeline_rank",
                "num_layers_per_virtual_pipeline_stage",
                "virtual_pipeline_model_parallel_size",
                "pipeline_model_parallel_layout",
            )
        )
        if unsaid and rule.chunks is not None and rule.chunks > 1:
            given.num_virtual_stages_per_pipeline_rank = rule.chunks
        return given

    @hookimpl(wrapper=True)
    def validate_arguments(self, args: Any) -> Generator[None, Any, Any]:
        """Refuse numbers of micro-batches that the schedule does not go with."""
        validated = yield
        plan = planned(validated)
        assert plan is not None
        count = getattr(validated, "num_microbatches", None)
        refused = plan.rule.refusal(plan.ranks, plan.chunks, count)
        if refused:
            raise UserError(f"{FLAG} {plan.rule.name}: {refused}")
        return validated

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any) -> Generator[None, Any, Any]:
        """Create a group for each direction between pipeline ranks."""
        pg = yield
        from mindspeed_pp.mail import DOWN, UP

        for name in (UP, DOWN):
            session.groups.split(name, pg.pp, [list(range(pg.pp.size()))])
        return pg

    @hookimpl
    def place_chunks(self, args: Any, pp_rank: int, pp_size: int) -> tuple[ChunkPlace, ...] | None:
        """Place chunks where the schedule wants them."""
        plan = planned(args)
        if plan is None or plan.placement.is_loop or pp_size != plan.ranks:
            return None
        placement = plan.placement
        last = placement.stages - 1
        return tuple(
            ChunkPlace(chunk if plan.chunks > 1 else None, stage, stage == 0, stage == last)
            for chunk, stage in enumerate(placement.held[pp_rank])
        )

    @hookimpl(wrapper=True)
    def build_transformer_config(self, args: Any) -> Generator[None, Any, Any]:
        """Put the layers of each stage where the schedule wants the stage."""
        config = yield
        plan = planned(args)
        assert plan is not None
        if not plan.placement.is_loop:
            from mindspeed_pp.placed_layout import placed

            config.pipeline_model_parallel_layout = placed(config, plan.placement)
        return config

    @hookimpl
    def get_forward_backward(self, args: Any, config: Any, pg: Any, run: Any) -> Callable[..., Any]:
        """Return the schedule."""
        plan = planned(args)
        assert plan is not None
        from mindspeed_pp.engine import Engine

        return Engine(run, args, config, pg, plan)


def _placed_elsewhere(args: Any, name: str) -> Sequence[str]:
    """Refuse what needs stages that run down the ranks."""
    found = []
    layers, ranks = getattr(args, "num_layers", None), args.pipeline_model_parallel_size
    laid_out = getattr(args, "pipeline_model_parallel_layout", None)
    if layers and not laid_out and layers % (2 * ranks):
        found.append(
            f"{FLAG} {name} cuts the model into {2 * ranks} stages, and --num-layers {layers} is no multiple; "
            "change it, or give --pipeline-model-parallel-layout"
        )
    for dest in (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ):
        if getattr(args, dest, None):
            flag = "--" + dest.replace("_", "-")
            found.append(
                f"{flag} with {FLAG} {name}: first and last stage are on one rank; use "
                "--pipeline-model-parallel-layout"
            )
    return found
