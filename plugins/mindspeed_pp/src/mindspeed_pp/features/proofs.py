"""Proofs: every schedule trains what megatron-core's own schedules, and one process, train."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario

BATCH = ("--micro-batch-size", "1", "--global-batch-size", "8")
PP2 = ("--pipeline-model-parallel-size", "2", *BATCH)
UNTIED = ("--untie-embeddings-and-output-weights",)
# The norm for clipping is summed over ranks, in another order where stages live elsewhere.
UNCLIPPED = ("--clip-grad", "0")
CHUNKS2 = ("--num-virtual-stages-per-pipeline-rank", "2")
FUSED = ("--use-gradient-accumulation-fusion",)
# Inputs and gradients of a layer's four linears, of the two micro-batches whose weight gradients are late.
_LATE_OPERANDS = 2 * 32 * 4 * ((64 + 192) + (64 + 64) + (64 + 256) + (256 + 64))
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
        baseline=tuple(flag for flag in layout if flag != "--pipeline-recompute"),
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

_PREDICTED = ("--mtp-num-layers", "1", "--position-embedding-type", "rope")
_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--swiglu"),
    *("--disable-bias-linear", "--moe-token-dispatcher-type", "alltoall", "--moe-aux-loss-coeff", "0.01"),
)
_DENSE_FIRST, _DENSE_FIRST_OF_2 = ("--moe-layer-freq", "[0,1,1,1]"), ("--moe-layer-freq", "[0,1]")

NOOP_PROOFS = (
    Scenario(
        "pp2",
        flags=(*PP2, *UNCLIPPED, "--num-layers", "6", "--noop-layers", "0,5"),
        baseline=(*BATCH, *UNCLIPPED, "--num-layers", "4"),
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-6,
    ),
    Scenario(
        "zbv",
        flags=(*PP2, *UNTIED, *UNCLIPPED, "--num-layers", "8", "--noop-layers", "0,3,6,7", *scheduled("zbv")),
        baseline=(*PP2, *UNTIED, *UNCLIPPED, "--num-layers", "4"),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        # The last stage has no layer that prediction layers could copy.
        "predictions-alone",
        flags=(*PP2, *UNTIED, *UNCLIPPED, *_PREDICTED, *_EXPERTS, "--noop-layers", "2,3", *_DENSE_FIRST),
        baseline=(
            *(*BATCH, *UNTIED, *UNCLIPPED, *_PREDICTED, *_EXPERTS),
            *("--num-layers", "2", *_DENSE_FIRST_OF_2),
        ),
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*PP2, "--num-layers", "6", "--noop-layers", "0,5"),
        world_size=2,
        resume=Resume(flags=(*BATCH, "--num-layers", "4"), world_size=1, with_feature=False),
    ),
)
_POSITIONS = ("--num-layers", "6", "--noop-layers", "0,3")
KEYS_PROOFS = (
    Scenario(
        "pp2",
        flags=(*PP2, *UNCLIPPED, *_POSITIONS, "--noop-layers-keep-numbering"),
        baseline=(*BATCH, *UNCLIPPED, "--num-layers", "4"),
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-6,
    ),
    Scenario(
        "resume",
        flags=(*PP2, *OVERLAPS, *_POSITIONS, "--noop-layers-keep-numbering"),
        world_size=2,
        resume=Resume(
            flags=(*PP2, *OVERLAPS, *_POSITIONS, *scheduled("zb-h1"), "--noop-layers-keep-numbering"),
            world_size=4,
        ),
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
        baseline=(*PP2, *_DROPPED),
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

_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_CP2 = ("--context-parallel-size", "2", "--position-embedding-type", "rope")
_LATENT = (
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *("--v-head-dim", "12", "--qk-layernorm", "--position-embedding-type", "rope"),
)


def elsewhere(name: str, schedule: str, *flags: str, ranks: int = 2, tolerance: float = 0.0) -> Scenario:
    """Compare a schedule that places stages elsewhere with megatron-core's 1F1B, bit for bit."""
    layout = (*PP2, *UNCLIPPED, *flags)
    return Scenario(
        name, flags=(*layout, *scheduled(schedule)), baseline=layout, world_size=ranks, tolerance=tolerance
    )


WEIGHT_GRADIENT_PROOFS = (
    elsewhere("zbv", "zbv", *UNTIED),
    as_native("zb-h1", "zb-h1"),
    as_native("zb-h2", "zb-h2"),
    as_native("zbi", "zbi", chunks=CHUNKS2),
    elsewhere("list", "list", *UNTIED),
    elsewhere("dualpipev", "dualpipev", *UNTIED),
    as_native("zb-h1-tp2", "zb-h1", *_TP2, ranks=4),
    elsewhere("zbv-tp2", "zbv", *UNTIED, *_TP2, ranks=4),
    as_native("zb-h1-overlaps", "zb-h1", *OVERLAPS, ranks=4),
    elsewhere("zbv-overlaps", "zbv", *UNTIED, *OVERLAPS, ranks=4),
    as_native("zb-h1-cp2", "zb-h1", *_CP2, ranks=4),
    elsewhere("zbv-cp2", "zbv", *UNTIED, *_CP2, ranks=4),
    as_native("zb-h1-bf16", "zb-h1", "--bf16"),
    elsewhere("zbv-bf16", "zbv", *UNTIED, "--bf16"),
    # The gradients of one embedding instead of those of two copies.
    elsewhere("zbv-predictions", "zbv", *UNTIED, *_PREDICTED, tolerance=1e-5),
    elsewhere("zbv-predictions-overlaps", "zbv", *UNTIED, *_PREDICTED, *OVERLAPS, ranks=4, tolerance=1e-5),
    elsewhere("zbv-per-token", "zbv", *UNTIED, "--calculate-per-token-loss"),
    as_native("zb-h1-latent", "zb-h1", *_LATENT),
    as_native("zb-h1-compressed", "zb-h1", *_LATENT, "--q-lora-rank", "16"),
    Scenario(
        "zbv-output-layer",
        flags=(*PP2, *UNCLIPPED, *UNTIED, *scheduled("zbv"), "--pipeline-w-output-layer"),
        baseline=(*PP2, *UNCLIPPED, *UNTIED),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        "zb-h1-fused",
        flags=(*PP2, *scheduled("zb-h1"), *FUSED),
        baseline=(*PP2, *FUSED),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        "zbv-tied-fused",
        flags=(*PP2, *scheduled("zbv"), *FUSED),
        baseline=(*PP2, *FUSED),
        world_size=2,
        tolerance=1e-5,
    ),
    Scenario(
        "nanopipe-swap",
        flags=(*PP2, *CHUNKS2, "--use-nanopipe", "--use-nanopipe-swap"),
        baseline=(*PP2, *CHUNKS2, "--use-nanopipe"),
        world_size=2,
        tolerance=0.0,
        same_feature=True,
        gains=(Gain("pipeline bytes to the host", exactly=_LATE_OPERANDS),),
    ),
    as_native("zb-h1-experts", "zb-h1", *_EXPERTS),
    elsewhere("zbv-experts", "zbv", *UNTIED, *_EXPERTS),
    as_native("zb-h1-recomputed", "zb-h1", "--pipeline-recompute"),
    Scenario(
        "nanopipe",
        flags=(*PP2, *CHUNKS2, *scheduled("nanopipe")),
        baseline=(*PP2, *CHUNKS2),
        world_size=2,
        tolerance=2e-6,
    ),
    Scenario(
        "zbv-tied",
        flags=(*PP2, *scheduled("zbv")),
        baseline=BATCH,
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*PP2, *OVERLAPS, *scheduled("zbv")),
        world_size=4,
        resume=Resume(
            flags=(*PP2, *OVERLAPS, *CHUNKS2, "--pipeline-num-transformer-layers", "[[1,1],[1,1]]"),
            world_size=2,
            with_feature=False,
        ),
    ),
)
