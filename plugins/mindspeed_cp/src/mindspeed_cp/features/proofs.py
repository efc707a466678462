"""What proves context parallelism: a model with its sequence split trains like the same model without."""

from __future__ import annotations

from mindspeed_core.feature import Scenario
from mindspeed_cp.algorithms import GATHER_ALGO, RING_ALGO

# Adam divides by the root of the second moment: with its usual epsilon the sign of a gradient that is zero
# but for rounding decides about a whole step.
MODEL = (
    *("--adam-eps", "1e-3", "--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--swiglu", "--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2"),
    *("--hidden-dropout", "0", "--attention-dropout", "0"),
)


def split_flags(size: int, algorithm: str, *more: str) -> tuple[str, ...]:
    """The flags that split a sequence over ``size`` ranks by an algorithm, with further ones."""
    return ("--context-parallel-size", str(size), "--context-parallel-algo", algorithm, *more)


def _proof(
    name: str, world: int, flags: tuple[str, ...], more: tuple[str, ...] = (), size: int = 2
) -> Scenario:
    """The same model, with the sequence split and whole, on as many processes as each needs."""
    return Scenario(
        name,
        flags=(*MODEL, *more, *flags),
        baseline=(*MODEL, *more),
        world_size=world,
        baseline_world_size=world // size,
        tolerance=2e-5,
    )


PROOFS = (
    _proof("ring", 2, split_flags(2, RING_ALGO)),
    _proof("ulysses", 2, split_flags(2, "ulysses_cp_algo")),
    _proof("fetched", 2, split_flags(2, GATHER_ALGO)),
    _proof("fetched-in-groups", 2, split_flags(2, GATHER_ALGO, "--cp-fetch-head-groups", "2")),
    _proof("balanced", 2, split_flags(2, "adaptive_cp_algo")),
    _proof("general", 2, split_flags(2, RING_ALGO, "--attention-mask-type", "general")),
    _proof("fused-update", 2, split_flags(2, RING_ALGO, "--use-fused-ring-attention-update")),
    _proof("kept-keys", 2, split_flags(2, RING_ALGO, "--context-parallel-kv-cache-policy", "full")),
    _proof("two-groups", 2, split_flags(2, RING_ALGO, "--use-cp-send-recv-overlap")),
    _proof(
        "gathered-keys",
        2,
        split_flags(2, "ulysses_cp_algo", "--use-ulysses-allgather-kv"),
        ("--num-query-groups", "1"),
    ),
    _proof(
        "exchanged-again",
        2,
        split_flags(2, "ulysses_cp_algo", "--context-parallel-kv-cache-policy", "full"),
        ("--num-query-groups", "1"),
    ),
    _proof("double-ring", 4, split_flags(4, RING_ALGO, "--cp-window-size", "2"), size=4),
    _proof("hybrid", 4, split_flags(4, "hybrid_cp_algo", "--ulysses-degree-in-cp", "2"), size=4),
    _proof(
        "hybrid-balanced", 4, split_flags(4, "hybrid_adaptive_cp_algo", "--ulysses-degree-in-cp", "2"), size=4
    ),
    _proof(
        "tp2-sp", 4, split_flags(2, RING_ALGO), ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    ),
    _proof("pp2", 4, split_flags(2, "ulysses_cp_algo"), ("--pipeline-model-parallel-size", "2")),
    _proof("dp2-distributed-optimizer", 4, split_flags(2, GATHER_ALGO), ("--use-distributed-optimizer",)),
    _proof(
        "recompute",
        2,
        split_flags(2, RING_ALGO),
        (
            *("--recompute-granularity", "full", "--recompute-method", "uniform"),
            *("--recompute-num-layers", "1"),
        ),
    ),
)
