"""The declaration of copies of the model that share a pipeline."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, hookimpl
from mindspeed_pp.asked import COPIES_FLAG, asked_for
from mindspeed_pp.features.engine import plan_of

_DECOUPLE = "--chimera-decouple-bw"
_ONE_MODEL = "the copies of a stage are on several pipeline ranks; drop it, or use another schedule"
_TOGETHER = "data-parallel ranks agree on it without the other copies, which would drift apart; drop it"


class Chimera(Feature):
    """Copies of every stage that are kept alike."""

    name = "pp-chimera"
    family = "pipeline-parallelism"
    summary = "Run copies of the model down and up the same pipeline ranks (Chimera)"
    flags = (
        Flag(
            COPIES_FLAG, type=int, help="Copies of the model on the pipeline ranks of chimera; 2 by default."
        ),
        Flag(
            _DECOUPLE, help="chimera: compute weight gradients after the last forward pass, where ranks wait."
        ),
    )
    requires = (
        Requirement(
            feature="pp-engine",
            reason="a schedule says which copy computes a micro-batch",
            remedy="add --pipeline-schedule chimera",
        ),
    )
    conflicts = (
        Conflict(
            flag="--overlap-grad-reduce",
            reason="ranks finish the copies of a stage in different orders; gradients are reduced at the end",
        ),
        Conflict(
            flag="--rampup-batch-size",
            reason="copies share micro-batches evenly, which every batch of a ramp would have to",
        ),
        Conflict(
            flag="--step-batch-size-schedule",
            reason="copies share micro-batches evenly, which every batch of a schedule would have to",
        ),
        Conflict(flag="--moe-router-enable-expert-bias", reason=_TOGETHER),
        Conflict(flag="--qk-clip", reason=_TOGETHER),
        Conflict(flag="--mtp-num-layers", reason=_ONE_MODEL),
        Conflict(flag="--num-layers-per-virtual-pipeline-stage", reason=_ONE_MODEL),
        Conflict(flag="--num-virtual-stages-per-pipeline-rank", reason=_ONE_MODEL),
        Conflict(flag="--expert-tensor-parallel-size", reason=_ONE_MODEL),
    )
    # Around the engine, which lays the stages out.
    before = ("pp-engine",)
    # Copies are wrapped and saved apart; scripts and loops that do so themselves would not.
    hosts = ("standalone",)
    docs = "mindspeed_pp:docs/pp-chimera.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    formulas = {
        # Of weights, gradients and optimizer state, against a schedule that holds the model once.
        "times_the_weights": "virtual_data_parallel_size",
    }
    verify = Proofs("mindspeed_pp.features.chimera_proofs:CHIMERA_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the schedule is chimera, or one of its options is given."""
        if getattr(args, "virtual_data_parallel_size", None) is not None:
            return True
        return getattr(args, "chimera_decouple_bw", False) or _is_chimera(args)

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse options without the schedule, and groups of experts that copies would tear apart."""
        if not _is_chimera(args):
            copies = getattr(args, "virtual_data_parallel_size", None)
            given = _DECOUPLE if copies is None else f"{COPIES_FLAG} {copies}"
            asked = next(iter(asked_for(args)), "no --pipeline-schedule")
            return (f"{given} with {asked}: it is an option of --pipeline-schedule chimera; drop it",)
        balancing = getattr(args, "moe_router_load_balancing_type", None)
        if "global_aux_loss" in (balancing if isinstance(balancing, list) else [balancing]):
            return (
                "--moe-router-load-balancing-type global_aux_loss with chimera: it counts tokens of one copy "
                "alone; use aux_loss",
            )
        if (getattr(args, "expert_model_parallel_size", None) or 1) > 1:
            return (
                f"--expert-model-parallel-size {args.expert_model_parallel_size} with chimera: {_ONE_MODEL}",
            )
        return ()

    @hookimpl(wrapper=True)
    def build_transformer_config(self, args: Any) -> Generator[None, Any, Any]:
        """Let a rank build one chunk for each copy."""
        config = yield
        plan = plan_of(args)
        config.virtual_pipeline_model_parallel_size = plan.chunks
        return config

    @hookimpl(wrapper=True)
    def build_process_groups(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Create a group for each stage, of the data-parallel ranks of all its copies."""
        pg = yield
        from mindspeed_pp.copies import create_groups

        plan = plan_of(args)
        create_groups(session, args, pg, plan.placement)
        return pg

    @hookimpl(wrapper=True)
    def build_model(self, session: Any, args: Any, pg: Any) -> Generator[None, Any, Any]:
        """Describe copies as replicas in checkpoints, and count their gradients once."""
        chunks = yield
        from mindspeed_pp.copies import mark_copies

        plan = plan_of(args)
        sharded = bool(args.use_distributed_optimizer)
        mark_copies(session, chunks, pg, plan.placement, self.name, sharded=sharded)
        return chunks

    @hookimpl(wrapper=True)
    def build_optimizer(self, session: Any, args: Any, pg: Any) -> Generator[None, Any, Any]:
        """Let the distributed optimizer shard over all copies."""
        optimizer = yield
        if args.use_distributed_optimizer:
            from mindspeed_pp.copies import sharded_over_copies

            plan = plan_of(args)
            sharded_over_copies(session, optimizer, pg, plan.placement)
        return optimizer

    @hookimpl
    def wrap_ddp(self, session: Any, args: Any, config: Any, ddp_config: Any, model: Any, pg: Any) -> Any:
        """Reduce the gradients of each stage over all its copies, which begin alike."""
        from mindspeed_pp.copies import wrapped_over_copies

        plan = plan_of(args)
        return wrapped_over_copies(session, args, config, ddp_config, model, pg, plan.placement)


def _is_chimera(args: Any) -> bool:
    if not asked_for(args):
        return False
    from mindspeed_pp.plan import asked_rule

    try:
        rule = asked_rule(args)
    except UserError:
        # The engine says what is wrong with it.
        return False
    return rule is not None and rule.name == "chimera"
