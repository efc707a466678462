"""Proofs of lists of micro-batches: what one process trains on the same batch."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario
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
