"""The values of ``--context-parallel-algo`` by what they do."""

from __future__ import annotations

RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO = "megatron_cp_algo", "ulysses_cp_algo", "hybrid_cp_algo"
GATHER_ALGO, ADAPTIVE_ALGO = "kvallgather_cp_algo", "adaptive_cp_algo"
HYBRID_ADAPTIVE_ALGO = "hybrid_adaptive_cp_algo"
ALGORITHMS = (RING_ALGO, ULYSSES_ALGO, HYBRID_ALGO, GATHER_ALGO, ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
WITH_RING = (RING_ALGO, HYBRID_ALGO)
WITH_HEADS = (HYBRID_ALGO, HYBRID_ADAPTIVE_ALGO)
ADAPTIVE = (ADAPTIVE_ALGO, HYBRID_ADAPTIVE_ALGO)
FETCHING = (GATHER_ALGO, *ADAPTIVE)
