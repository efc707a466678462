"""Proofs of experts with a capacity: the same on every layout, and dropless as megatron-core's layer."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2

DEEPSPEED = ("--moe-model-type", "deepspeed_moe")
NO_DROP = (*DEEPSPEED, "--moe-no-drop")
PADDED = (*NO_DROP, "--moe-dynamic-padding")
# As many places as tokens: nothing is dropped, whatever part of a sequence a rank has.
ROOMY = (*DEEPSPEED, "--moe-train-capacity-factor", "2")
_TIGHT = (*DEEPSPEED, "--moe-train-capacity-factor", "0.6")
_ONE_CHOICE = ("--moe-router-topk", "1")
_RANDOM = (*_TIGHT, *_ONE_CHOICE, "--noisy-gate-policy", "Jitter")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_CP2 = ("--context-parallel-size", "2", "--position-embedding-type", "rope")
_PP2 = ("--pipeline-model-parallel-size", "2")
_PER_TOKEN = ("--calculate-per-token-loss",)
_UNBALANCED = ("--moe-aux-loss-coeff", "0")
_SEQUENTIAL = tuple(flag for flag in MODEL if flag != "--moe-grouped-gemm")


def _as_dropless(
    name: str, flags: tuple[str, ...], *layout: str, ranks: int = 2, tolerance: float = 1e-5
) -> Scenario:
    """Compare a model without drops and without its loss to megatron-core's, on the same ranks."""
    model = (*MODEL, *SHARED, *_UNBALANCED, *EP2, *layout)
    return Scenario(name, flags=(*model, *flags), baseline=model, world_size=ranks, tolerance=tolerance)


def _as_on_one_rank(
    name: str,
    flags: tuple[str, ...],
    *layout: str,
    ranks: int = 2,
    both: tuple[str, ...] = (),
    model: tuple[str, ...] = (*MODEL, *SHARED),
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    """Compare a model on several ranks to the same one on one rank."""
    return Scenario(
        name,
        flags=(*model, *flags, *layout, *both),
        baseline=(*model, *flags, *both),
        world_size=ranks,
        baseline_world_size=1,
        same_feature=True,
        tolerance=1e-5,
        gains=gains,
    )


DEEPSPEED_PROOFS = (
    _as_dropless("no-drop", NO_DROP),
    _as_dropless("no-drop-padded", PADDED),
    _as_dropless("roomy", ROOMY, *_BOTH_OVERLAPS),
    _as_dropless("no-drop-bf16", NO_DROP, *_BF16, tolerance=2e-2),
    _as_dropless("cut-experts", PADDED, *TP2, ranks=4),
    _as_dropless("recompute-full", PADDED, *_FULL),
    _as_dropless("overlapped", ROOMY, "--moe-alltoall-overlap-comm"),
    _as_on_one_rank("distributed-optimizer-overlapped", _TIGHT, *EP2, *_BOTH_OVERLAPS),
    _as_on_one_rank("one-choice", (*_TIGHT, *_ONE_CHOICE, "--no-use-rts"), *EP2),
    _as_on_one_rank("sequential-experts", _TIGHT, *EP2, model=(*_SEQUENTIAL, *SHARED)),
    _as_on_one_rank("sinkhorn", (*_TIGHT, "--moe-use-sinkhorn"), *EP2),
    _as_on_one_rank("every-second-layer", (*_TIGHT, "--expert-interval", "2"), *EP2),
    _as_on_one_rank("recompute", _TIGHT, *EP2, *_FULL),
    _as_on_one_rank("pp2", _TIGHT, *EP2, *_PP2, ranks=4),
    _as_on_one_rank("tp2", ROOMY, *TP2),
    _as_on_one_rank(
        "tp2-whole-experts", ROOMY, *TP2, *EP2, "--expert-tensor-parallel-size", "1", both=_PER_TOKEN
    ),
    _as_on_one_rank("cp2", ROOMY, "--context-parallel-size", "2", both=_CP2[2:]),
    _as_on_one_rank("ep4", _TIGHT, "--expert-model-parallel-size", "4", ranks=4),
    # What is random goes on where it stopped: only the overlap of communication differs.
    Scenario(
        "resume-random",
        flags=(*MODEL, *_RANDOM, *EP2, *_SHARDED),
        world_size=2,
        tolerance=0.0,
        resume=Resume(flags=(*MODEL, *_RANDOM, *EP2, *_BOTH_OVERLAPS), world_size=2),
    ),
    Scenario(
        "random-recomputed",
        flags=(*MODEL, *_RANDOM, *EP2, *_FULL),
        baseline=(*MODEL, *_RANDOM, *EP2),
        world_size=2,
        same_feature=True,
        tolerance=0.0,
    ),
    Scenario(
        "resume",
        flags=(*MODEL, *SHARED, *_TIGHT, *EP2, *_BOTH_OVERLAPS),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *SHARED, *_TIGHT, *_SHARDED), world_size=1),
    ),
)
DROPLESS_PROOFS = (
    Scenario("one-rank", flags=(*MODEL, "--moe-dropless"), baseline=MODEL, tolerance=0.0),
    Scenario(
        "distributed-optimizer-overlapped",
        flags=(*MODEL, *EP2, *_BOTH_OVERLAPS, "--moe-dropless"),
        baseline=(*MODEL, *EP2, *_BOTH_OVERLAPS),
        world_size=2,
        tolerance=0.0,
    ),
    Scenario(
        "resume",
        flags=(*MODEL, *EP2, *_BOTH_OVERLAPS, "--moe-dropless"),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *_SHARDED), world_size=1, with_feature=False),
    ),
)
