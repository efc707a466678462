"""The declaration of random numbers that do not depend on the order of a schedule."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from mindspeed_core.feature import Feature, Flag, Proofs, hookimpl


class RandomPerMicrobatch(Feature):
    """Generators seeded anew for every forward pass, from step, stage and micro-batch."""

    name = "pp-random"
    family = "pipeline-parallelism"
    summary = "Make dropout independent of the pipeline schedule"
    flags = (
        Flag(
            "--pipeline-rng-per-microbatch",
            help="Seed random generators per step, pipeline stage and micro-batch.",
        ),
    )
    docs = "mindspeed_pp:docs/pp-random.md"
    fake_tensors = True
    deterministic = True
    affects_checkpoint = False
    verify = Proofs("mindspeed_pp.features.proofs:RANDOM_PROOFS")

    @hookimpl(wrapper=True)
    def forward_step(self, session: Any, run: Any) -> Generator[None, Any, Any]:
        """Draw what this forward pass draws from a seed of its own."""
        from mindspeed_megatron.chunk_places import place_of_chunk
        from mindspeed_pp.random_states import seeded

        context = run.context
        place = place_of_chunk(session, run.args, run.pg, context.vp_stage)
        parts = (run.args.seed, run.iteration, place.global_stage, context.microbatch, int(context.training))
        with seeded(session.platform, parts):
            result = yield
        return result
