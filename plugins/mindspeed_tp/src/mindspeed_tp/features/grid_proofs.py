"""Proofs of two-dimensional tensor parallelism: a model trains as on one process."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import Resume, Scenario
from mindspeed_tp.features.proofs import (
    BOTH_OVERLAPS,
    COC,
    FULL,
    INTERLEAVED,
    MODEL,
    PLAIN,
    PP2,
    SHARDED,
    SP,
    as_on_one,
    as_without,
)


def grid(x: int, y: int) -> tuple[str, ...]:
    """Return the flags of a grid."""
    return (
        *("--tensor-model-parallel-size", str(x * y)),
        *("--tp-2d", "--tp-x", str(x), "--tp-y", str(y)),
    )


_GQA = ("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "4")
_LEVEL2 = (*FULL, "--optimize-recomp-communication-level", "2")
_OVERLAPS = (
    *("--enable-overlap-ag-with-matmul", "--enable-overlap-matmul-with-rs"),
    "--enable-backward-overlap-ag-with-matmul",
)


def _on_one(name: str, x: int, y: int, *layout: str, **facts: Any) -> Scenario:
    more = facts.pop("more", 1)
    return as_on_one(name, grid(x, y), *layout, ranks=x * y * more, **facts)


GRID_PROOFS = (
    _on_one("1x2", 1, 2),
    _on_one("2x2", 2, 2, both=_GQA),
    _on_one("2x1", 2, 1, *SP),
    _on_one("4x1", 4, 1),
    _on_one("1x4", 1, 4),
    _on_one("biases", 2, 2, model=PLAIN),
    _on_one("zero-centred", 1, 2, both=("--apply-layernorm-1p",)),
    _on_one("query-norm", 2, 2, both=("--qk-layernorm",)),
    _on_one("distributed-optimizer-overlapped", 1, 2, *BOTH_OVERLAPS, more=2),
    _on_one("per-token-loss", 1, 2, more=2, both=("--calculate-per-token-loss",)),
    _on_one("pp2", 1, 2, *PP2, more=2),
    _on_one("interleaved", 1, 2, *INTERLEAVED, more=2, both=("--num-layers", "4")),
    _on_one("recompute-full", 2, 2, *FULL),
    _on_one("recompute-comm", 2, 2, *_LEVEL2),
    _on_one("recompute-comm-biases", 2, 2, *_LEVEL2, model=PLAIN),
    _on_one("in-parts", 2, 2, *COC, "2"),
    _on_one("fused-kernels", 2, 2, "--use-ascend-mc2"),
    _on_one("in-parts-recompute-comm", 2, 2, *COC, "2", *_LEVEL2),
    _on_one("overlaps", 2, 2, *_OVERLAPS),
    _on_one("flash-attention", 1, 2, "--use-flash-attn"),
    _on_one("fused-rope", 1, 2, "--use-fused-rotary-pos-emb"),
    _on_one("fused-activation", 1, 2, "--use-fused-swiglu"),
    _on_one("in-place", 1, 2, "--use-gradient-accumulation-fusion"),
    _on_one(
        "context-parallel",
        *(1, 2, "--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo"),
        more=2,
    ),
    Scenario(
        "bf16",
        flags=(*MODEL, *grid(1, 2), "--bf16"),
        baseline=(*MODEL, "--bf16"),
        world_size=2,
        baseline_world_size=1,
        tolerance=5e-2,
        compare=("losses",),
    ),
    as_without(
        "former-spelling",
        ("--use-nd-matmul", "--nd1-dim1-size", "1", "--nd2-dim1-size", "2"),
        *("--tensor-model-parallel-size", "2"),
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*MODEL, *grid(2, 2), *BOTH_OVERLAPS),
        world_size=4,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *SHARDED), world_size=1, with_feature=False),
    ),
    Scenario(
        "resume-on-another-grid",
        flags=(*MODEL, *grid(2, 2), *BOTH_OVERLAPS),
        world_size=4,
        tolerance=1e-5,
        resume=Resume(flags=(*MODEL, *grid(1, 2), *SHARDED), world_size=4),
    ),
    Scenario(
        "resume-from-one-rank",
        flags=(*MODEL, *grid(1, 2)),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(
            flags=(*MODEL, "--tensor-model-parallel-size", "2", *SP), world_size=2, with_feature=False
        ),
    ),
)
