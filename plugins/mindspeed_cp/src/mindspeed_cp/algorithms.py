"""The values of ``--context-parallel-algo`` by what they do."""

from __future__ import annotations

from mindspeed_core.errors import RefusedValue

RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
GATHER_ALGO, ADAPTIVE_ALGO = "kvallgather_cp_algo", "adaptive_cp_algo"
HYBRID_ADAPTIVE_ALGO = "hybrid_adaptive_cp_algo"
ALGORITHMS = (RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO, GATHER_ALGO, ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
WITH_RING = (RING_ALGO, HYBRID_ALGO)
WITH_HEADS = (HYBRID_ALGO, HYBRID_ADAPTIVE_ALGO)
ADAPTIVE = (ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
FETCHING = (GATHER_ALGO, *ADAPTIVE)


def known_algorithm(text: str) -> str:
    """Return a value of the flag as it is.

    Raises:
        RefusedValue: it is one of MindSpeed's that is not here.
    """
    if text == "hamilton_cp_algo":
        raise RefusedValue(
            "MindSpeed's hamilton_cp_algo computes attention without a mask only and is not here; "
            "megatron_cp_algo and hybrid_cp_algo compute that and every mask"
        )
    return text
