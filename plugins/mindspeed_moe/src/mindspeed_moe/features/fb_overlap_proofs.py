"""Proofs of forward and backward passes side by side: a model trains as without, to the bit."""

from __future__ import annotations

from importlib.util import find_spec

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2, as_without

PAIRED = ("--moe-fb-overlap",)
FOUR_MICRO_BATCHES = ("--micro-batch-size", "1", "--global-batch-size", "8")
INTERLEAVED = (
    *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
    *("--num-layers-per-virtual-pipeline-stage", "1", "--micro-batch-size", "1", "--global-batch-size", "8"),
)
_DUAL_PIPE_V = (
    *("--num-layers", "4", "--pipeline-model-parallel-size", "2", "--untie-embeddings-and-output-weights"),
    *("--micro-batch-size", "1", "--global-batch-size", "12", "--schedules-method", "dualpipev"),
)
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_CP2 = ("--context-parallel-size", "2", "--position-embedding-type", "rope")
_DROPPED = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
_PREDICTED = ("--mtp-num-layers", "1", "--untie-embeddings-and-output-weights")
_RECOMPUTED = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")

FB_OVERLAP_PROOFS = (
    as_without(
        "distributed-optimizer-overlapped",
        *(*FOUR_MICRO_BATCHES, *_BOTH_OVERLAPS),
        plain=(*FOUR_MICRO_BATCHES, *_SHARDED),
        flags=PAIRED,
    ),
    as_without(
        "ep2",
        *FOUR_MICRO_BATCHES,
        flags=PAIRED,
        gains=(Gain("collective_calls", 1.0), Gain("sent_bytes", 1.0)),
    ),
    as_without("no-shared-experts", *FOUR_MICRO_BATCHES, model=MODEL, flags=PAIRED),
    as_without("bf16", *FOUR_MICRO_BATCHES, *_BF16, flags=PAIRED),
    as_without("accumulated-in-place", "--gemm-gradient-accumulation-fusion", flags=PAIRED),
    as_without("dropout", *FOUR_MICRO_BATCHES, *_DROPPED, flags=PAIRED),
    as_without("per-token-loss", *FOUR_MICRO_BATCHES, "--calculate-per-token-loss", flags=PAIRED),
    as_without("recomputed-attention", *_RECOMPUTED, flags=PAIRED),
    as_without("predictions", *_PREDICTED, flags=PAIRED),
    as_without("dense-then-experts", "--moe-layer-freq", "[0,1]", flags=PAIRED),
    as_without("capacity", "--moe-expert-capacity-factor", "1.0", flags=PAIRED),
    as_without(
        "padded-capacity",
        *("--moe-expert-capacity-factor", "1.0", "--moe-pad-expert-input-to-capacity"),
        flags=PAIRED,
    ),
    as_without("fused-permutation", flags=(*PAIRED, "--moe-permute-fusion")),
    as_without("level0", *FOUR_MICRO_BATCHES, flags=(*PAIRED, "--moe-zero-memory", "level0")),
    as_without("level1", *FOUR_MICRO_BATCHES, flags=(*PAIRED, "--moe-zero-memory", "level1")),
    as_without("cp2", *_CP2, flags=PAIRED),
    as_without("tp2-whole-experts", *TP2, "--expert-tensor-parallel-size", "1", flags=PAIRED),
    as_without("tp2-cut-experts", *TP2, ranks=4, flags=PAIRED),
    as_without("interleaved", *INTERLEAVED, ranks=4, flags=PAIRED),
    as_without(
        "interleaved-overlapped",
        *(*INTERLEAVED, *_BOTH_OVERLAPS),
        plain=(*INTERLEAVED, *_SHARDED),
        ranks=4,
        flags=PAIRED,
    ),
    as_without("interleaved-bf16", *INTERLEAVED, *_BF16, ranks=4, flags=PAIRED),
    # The schedule belongs to a package that need not be there.
    *(
        (as_without("dual-pipe-v", *_DUAL_PIPE_V, ranks=4, flags=PAIRED),)
        if find_spec("mindspeed_pp")
        else ()
    ),
    Scenario(
        "one-process",
        flags=(*MODEL, *SHARED, *EP2, *PAIRED),
        baseline=(*MODEL, *SHARED),
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*MODEL, *SHARED, *EP2, *_BOTH_OVERLAPS, *PAIRED),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *SHARED, *_SHARDED), world_size=1, with_feature=False),
    ),
)
