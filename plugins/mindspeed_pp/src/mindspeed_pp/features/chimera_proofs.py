"""Proofs of chimera: copies of the model together train what one of them trains alone."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario
from mindspeed_pp.features.proofs import BATCH, PP2, UNTIED, scheduled

PP4 = ("--pipeline-model-parallel-size", "4", *BATCH)
_CHIMERA = scheduled("chimera")
# Copies add the gradients of their micro-batches apart, which rounds otherwise: in float64 1e-15 is left.
_TOLERANCE = 1e-5


def as_one(
    name: str, layout: tuple[str, ...], *flags: str, model: tuple[str, ...] = (), ranks: int = 2
) -> Scenario:
    """Compare copies of a model with one process."""
    return Scenario(
        name,
        flags=(*layout, *model, *_CHIMERA, *flags),
        baseline=(*BATCH, *model),
        world_size=ranks,
        baseline_world_size=1,
        tolerance=_TOLERANCE,
    )


CHIMERA_PROOFS = (
    as_one("pp2", PP2, model=UNTIED),
    as_one("pp2-tied", PP2),
    as_one("pp2-decoupled", PP2, "--chimera-decouple-bw", model=UNTIED),
    as_one("pp4", PP4, model=UNTIED, ranks=4),
    as_one("pp4-four-copies", PP4, "--virtual-data-parallel-size", "4", ranks=4),
    as_one("pp2-dp2", PP2, ranks=4),
    as_one("pp2-sharded", PP2, "--use-distributed-optimizer"),
    as_one("pp4-sharded", PP4, "--use-distributed-optimizer", model=UNTIED, ranks=4),
    Scenario(
        "pp2-bf16",
        flags=(*PP2, *UNTIED, *_CHIMERA, "--bf16"),
        baseline=(*PP2, *UNTIED, "--bf16"),
        world_size=2,
        tolerance=0.05,
    ),
    as_one("pp2-per-token", PP2, model=("--calculate-per-token-loss",)),
    as_one("pp2-tp2", PP2, "--tensor-model-parallel-size", "2", "--sequence-parallel", ranks=4),
    Scenario(
        "resume",
        flags=(*PP2, *_CHIMERA),
        world_size=2,
        resume=Resume(flags=(*PP2, *scheduled("1f1b")), world_size=2, with_feature=False),
    ),
    Scenario(
        "resume-sharded",
        flags=(*PP4, *_CHIMERA, "--use-distributed-optimizer"),
        world_size=4,
        resume=Resume(flags=(*PP2, *_CHIMERA, "--use-distributed-optimizer"), world_size=4),
    ),
    Scenario(
        "resume-alone",
        flags=(*PP4, *_CHIMERA),
        world_size=4,
        resume=Resume(flags=BATCH, world_size=1, with_feature=False),
    ),
)
