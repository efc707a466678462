"""Proofs of context parallelism: a model with its sequence split trains like the same model without."""

from __future__ import annotations

from mindspeed_core.feature import Resume, Scenario
from mindspeed_cp.algorithms import (
    ADAPTIVE_ALGO,
    GATHER_ALGO,
    HYBRID_ADAPTIVE_ALGO,
    HYBRID_ALGO,
    RING_ALGO,
    ULYSSES_ALGO,
)

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
MODEL = (
    *("--adam-eps", "1e-3", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--swiglu", "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)


def split_flags(size: int, algorithm: str, *more: str) -> tuple[str, ...]:
    """Return the flags that split a sequence over ``size`` ranks by an algorithm, with further ones."""
    return ("--context-parallel-size", str(size), "--context-parallel-algo", algorithm, *more)


def same_model(
    name: str, split: tuple[str, ...], model: tuple[str, ...], whole: tuple[str, ...] = (), ranks: int = 1
) -> Scenario:
    """Compare a model with its sequence split to the same model with whole sequences.

    Args:
        name: of the scenario.
        split: the result of `split_flags`.
        model: flags of both sides.
        whole: further flags of the side with whole sequences.
        ranks: processes of that side.
    """
    return Scenario(
        name,
        flags=(*model, *split),
        baseline=(*model, *whole),
        world_size=int(split[1]) * ranks,
        baseline_world_size=ranks,
        tolerance=2e-5,
    )


def taken_over(
    name: str,
    split: tuple[str, ...],
    model: tuple[str, ...],
    other: tuple[str, ...],
    *,
    ranks: int,
    with_feature: bool = True,
) -> Scenario:
    """Continue the checkpoint of a split sequence as it was, and in another layout.

    Args:
        name: of the scenario.
        split: the result of `split_flags`.
        model: flags of both layouts.
        other: flags of the other layout.
        ranks: processes of the other layout.
        with_feature: the feature is active there too.
    """
    return Scenario(
        name,
        flags=(*model, *split),
        world_size=int(split[1]),
        tolerance=2e-5,
        resume=Resume(flags=(*model, *other), world_size=ranks, with_feature=with_feature),
    )


_RING = split_flags(2, RING_ALGO)
_HEADS = split_flags(2, ULYSSES_ALGO)
_DEGREE = ("--ulysses-degree-in-cp", "2")
_TP2_SP = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_POLICY = ("--context-parallel-kv-cache-policy", "full")
_ONE_KEY_HEAD = (*MODEL, "--num-query-groups", "1")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
PROOFS = (
    same_model("ring", _RING, MODEL),
    same_model("ulysses", _HEADS, MODEL),
    same_model("fetched", split_flags(2, GATHER_ALGO), MODEL),
    same_model("fetched-in-groups", split_flags(2, GATHER_ALGO, "--cp-fetch-head-groups", "2"), MODEL),
    same_model("balanced", split_flags(2, ADAPTIVE_ALGO), MODEL),
    same_model("general", (*_RING, "--attention-mask-type", "general"), MODEL),
    same_model("fused-update", (*_RING, "--use-fused-ring-attention-update"), MODEL),
    same_model("kept-keys", (*_RING, *_POLICY), MODEL),
    same_model("two-groups", (*_RING, "--use-cp-send-recv-overlap"), MODEL),
    same_model("gathered-keys", (*_HEADS, "--use-ulysses-allgather-kv"), _ONE_KEY_HEAD),
    same_model("gathered-key-heads", (*_HEADS, "--use-ulysses-allgather-kv"), MODEL),
    same_model("exchanged-again", (*_HEADS, *_POLICY), _ONE_KEY_HEAD),
    same_model("double-ring", split_flags(4, RING_ALGO, "--cp-window-size", "2"), MODEL),
    same_model("hybrid", split_flags(4, HYBRID_ALGO, *_DEGREE), MODEL),
    same_model("hybrid-balanced", split_flags(4, HYBRID_ADAPTIVE_ALGO, *_DEGREE), MODEL),
    same_model("tp2-sp", _RING, (*MODEL, *_TP2_SP), ranks=2),
    same_model("pp2", _HEADS, (*MODEL, "--pipeline-model-parallel-size", "2"), ranks=2),
    same_model(
        "dp2-distributed-optimizer",
        split_flags(2, GATHER_ALGO),
        (*MODEL, "--use-distributed-optimizer"),
        ranks=2,
    ),
    same_model("recompute", _RING, (*MODEL, *_FULL)),
    taken_over("resume", _RING, MODEL, (), ranks=1, with_feature=False),
    taken_over("resume-tp2", _RING, (*MODEL, "--use-distributed-optimizer"), (*_HEADS, *_TP2_SP), ranks=4),
)
