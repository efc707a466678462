"""The declaration of weight gradients that come later."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_core.feature import Conflict, Feature, Flag, Proofs, Requirement, dest_of, hookimpl
from mindspeed_pp.asked import asked_for

OUTPUT_FLAG = "--pipeline-w-output-layer"
_OUTPUT_DEST = "pipeline_w_output_layer"
_WHOLE_EXPERTS = (
    *("--balanced-moe-experts", "--moe-experts-pipeline-degree", "--use-pipe-experts"),
    *("--moe-alltoall-mc2", "--moe-bmm-mc2"),
)
"""Flags of mindspeed-moe whose grouped experts compute weight gradients with those of their rows."""


class LaterWeightGradients(Feature):
    """Linears of schedules that compute weight gradients apart."""

    name = "pp-weight-gradients"
    family = "pipeline-parallelism"
    summary = "Compute weight gradients when the pipeline schedule says so"
    flags = (Flag(OUTPUT_FLAG, help="Delay the weight gradient of an untied output layer too."),)
    requires = (
        Requirement(
            feature="pp-engine",
            reason="a schedule says when weight gradients are computed",
            remedy="add --pipeline-schedule zb-h1, zbi or zbv",
        ),
    )
    conflicts = (
        Conflict(
            flag="--cuda-graph-impl",
            one_of=("local", "transformer_engine"),
            reason="a captured backward pass computes weight gradients at once; use 1f1b or interleaved",
        ),
    )
    # It changes what they put in the place of a layer's experts.
    before = ("grouped-experts", "moe-core")
    slots = ("dw-queue",)
    docs = "mindspeed_pp:docs/pp-weight-gradients.md"
    places_modules = True
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_pp.features.proofs:WEIGHT_GRADIENT_PROOFS")

    @classmethod
    def enabled(cls, args: Any) -> bool:
        """Return whether the schedule that is asked for computes weight gradients apart."""
        late_output = bool(getattr(args, _OUTPUT_DEST, False))
        if not asked_for(args):
            return late_output
        from mindspeed_pp.plan import asked_rule

        try:
            rule = asked_rule(args)
        except UserError:
            # The engine says what is wrong with it.
            return False
        splits = rule is not None and rule.splits
        return splits or late_output

    @classmethod
    def validate(cls, args: Any) -> Sequence[str]:
        """Refuse layers whose linears cannot be split, and an output layer without a weight of its own."""
        from mindspeed_pp.plan import asked_rule

        if getattr(args, _OUTPUT_DEST, False):
            if not getattr(args, "untie_embeddings_and_output_weights", False):
                return (
                    f"{OUTPUT_FLAG}: the output layer has the weight of the embedding; add "
                    "--untie-embeddings-and-output-weights, or drop it",
                )
            rule = asked_rule(args)
            if rule is None or not rule.splits:
                return (
                    f"{OUTPUT_FLAG}: no pipeline schedule computes weight gradients apart; use "
                    "--pipeline-schedule zb-h1, zbi or zbv, or drop it",
                )
        if getattr(args, "transformer_impl", None) in (None, "local"):
            return ()
        asked = next(iter(asked_for(args)))
        return (
            f"{asked} with --transformer-impl {args.transformer_impl}: linears of TransformerEngine compute "
            "weight gradients with those of their inputs; use --transformer-impl local, or 1f1b or "
            "interleaved",
        )

    @classmethod
    def notes(cls, args: Any) -> Sequence[str]:
        """Name what keeps the weight gradients of experts where they are."""
        if not getattr(args, "moe_grouped_gemm", False):
            return ()
        asked = next(iter(asked_for(args)))
        return tuple(
            f"{flag} with {asked}: weight gradients of these experts are computed with those of their input, "
            "and W has those of the other linears alone"
            for flag in _WHOLE_EXPERTS
            if getattr(args, dest_of(flag), None)
        )

    @hookimpl(wrapper=True)
    def build_layer_spec(self, session: Any) -> Generator[None, Any, Any]:
        """Let linears leave their weight gradient to the schedule."""
        spec = yield
        from mindspeed_pp.weight_gradients import place_later_linears

        return place_later_linears(session, spec, self.name)

    @hookimpl(wrapper=True)
    def build_model_chunk(self, session: Any, args: Any) -> Generator[None, Any, Any]:
        """Change the linears that no layer specification reaches."""
        chunk = yield
        from mindspeed_pp.weight_gradients import change_built_linears

        change_built_linears(session, chunk, self.name, output_layer=bool(getattr(args, _OUTPUT_DEST, False)))
        return chunk

    @hookimpl(wrapper=True)
    def build_ddp_config(self) -> Generator[None, Any, Any]:
        """Let data parallelism wait for weight gradients."""
        config = yield
        config.delay_wgrad_compute = True
        return config
