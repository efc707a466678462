"""Proofs: every schedule trains what megatron-core's own schedules, and one process, train."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario

BATCH = ("--micro-batch-size", "1", "--global-batch-size", "8")
PP2 = ("--pipeline-model-parallel-size", "2", *BATCH)
UNTIED = ("--untie-embeddings-and-output-weights",)
# The norm for clipping is summed over ranks, in another order where stages live elsewhere.
UNCLIPPED = ("--clip-grad", "0")
CHUNKS2 = ("--num-virtual-stages-per-pipeline-rank", "2")
OVERLAPS = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def scheduled(name: str) -> tuple[str, ...]:
    """Return the flag of a schedule."""
    return ("--pipeline-schedule", name)


def as_native(
    name: str, schedule: str, *flags: str, chunks: tuple[str, ...] = (), ranks: int = 2
) -> Scenario:
    """Compare a schedule with megatron-core's own on the same ranks, bit for bit."""
    layout = (*PP2, *flags, *chunks)
    return Scenario(
        name,
        flags=(*layout, *scheduled(schedule)),
        baseline=layout,
        world_size=ranks,
        tolerance=0.0,
    )


ENGINE_PROOFS = (
    as_native("1f1b", "1f1b"),
    as_native("interleaved", "interleaved", chunks=CHUNKS2),
    as_native("fold-aiao", "fold-aiao", chunks=CHUNKS2),
    as_native("1f1b-overlaps", "1f1b", *OVERLAPS, ranks=4),
    as_native("interleaved-overlaps", "interleaved", *OVERLAPS, chunks=CHUNKS2, ranks=4),
    as_native("1f1b-tp2", "1f1b", "--tensor-model-parallel-size", "2", "--sequence-parallel", ranks=4),
    as_native("1f1b-per-token", "1f1b", "--calculate-per-token-loss"),
    as_native("1f1b-bf16", "1f1b", "--bf16"),
    Scenario(
        "resume",
        flags=(*PP2, *scheduled("1f1b")),
        world_size=2,
        resume=Resume(flags=(*BATCH,), world_size=1, with_feature=False),
    ),
)

NOOP_PROOFS = (
    Scenario(
        "pp2",
        flags=(*PP2, *UNCLIPPED, "--num-layers", "6", "--noop-layers", "0,5"),
        baseline=(*BATCH, *UNCLIPPED, "--num-layers", "4"),
        world_size=2,
        baseline_world_size=1,
        tolerance=0.0,
    ),
    Scenario(
        "zbv",
        flags=(*PP2, *UNTIED, *UNCLIPPED, "--num-layers", "8", "--noop-layers", "0,3,6,7", *scheduled("zbv")),
        baseline=(*PP2, *UNTIED, *UNCLIPPED, "--num-layers", "4"),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        "resume",
        flags=(*PP2, "--num-layers", "6", "--noop-layers", "0,5"),
        world_size=2,
        resume=Resume(flags=(*BATCH, "--num-layers", "4"), world_size=1, with_feature=False),
    ),
)
ROWS_PROOFS = (
    Scenario(
        "interleaved",
        flags=(*PP2, *CHUNKS2, "--pipeline-num-transformer-layers", "[[0,1],[2,1]]"),
        baseline=(*PP2, *CHUNKS2),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        "resume",
        flags=(*PP2, *CHUNKS2, "--pipeline-num-transformer-layers", "[[0,1],[2,1]]"),
        world_size=2,
        resume=Resume(flags=BATCH, world_size=1, with_feature=False),
    ),
)
LIST_PROOFS = (
    Scenario(
        "zb-h1",
        flags=(*PP2, *UNCLIPPED, *scheduled("zb-h1"), "--num-layer-list", "3,1"),
        baseline=(*PP2, *UNCLIPPED),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        "resume",
        flags=(*PP2, "--num-layer-list", "3,1"),
        world_size=2,
        resume=Resume(flags=BATCH, world_size=1, with_feature=False),
    ),
)

_DROPPED = (
    *("--hidden-dropout", "0.1", "--attention-dropout", "0.1"),
    "--pipeline-rng-per-microbatch",
)
RANDOM_PROOFS = (
    Scenario(
        "zb-h1",
        flags=(*PP2, *_DROPPED, *scheduled("zb-h1")),
        baseline=(*PP2, *_DROPPED, *CHUNKS2),
        world_size=2,
        tolerance=0.0,
        same_feature=True,
    ),
    Scenario(
        "resume",
        flags=(*PP2, *_DROPPED),
        world_size=2,
        resume=Resume(flags=(*PP2, *_DROPPED, *scheduled("zb-h1")), world_size=2),
    ),
)

WEIGHT_GRADIENT_PROOFS = (
    as_native("zb-h1", "zb-h1"),
    Scenario(
        "zbv",
        flags=(*PP2, *UNTIED, *UNCLIPPED, *scheduled("zbv")),
        baseline=(*PP2, *UNTIED, *UNCLIPPED),
        world_size=2,
        tolerance=0.0,
    ),
)
