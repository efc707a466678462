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


def on_one(name: str, x: int, y: int, *layout: str, **facts: Any) -> Scenario:
    """Compare a model on a grid, as `as_on_one` does; ``more`` is how many such grids there are."""
    more = facts.pop("more", 1)
    return as_on_one(name, grid(x, y), *layout, ranks=x * y * more, **facts)


_GQA = ("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "4")
LEVEL2 = (*FULL, "--optimize-recomp-communication-level", "2")
_KERNELS = ("--use-flash-attn", "--use-fused-rotary-pos-emb", "--use-fused-swiglu")
_OVERLAPS = (
    *("--enable-overlap-ag-with-matmul", "--enable-overlap-matmul-with-rs"),
    "--enable-backward-overlap-ag-with-matmul",
)
_ULYSSES = ("--context-parallel-size", "2", "--context-parallel-algo", "ulysses_cp_algo")

# One of each kind, so that all together take less than a minute on two cores.
GRID_PROOFS = (
    on_one("1x2", 1, 2),
    on_one("2x2", 2, 2, both=_GQA),
    on_one("zero-centred", 2, 1, *SP, both=("--apply-layernorm-1p",)),
    on_one("biases", 2, 2, model=PLAIN),
    on_one("distributed-optimizer-overlapped", 1, 2, *BOTH_OVERLAPS, more=2),
    on_one("per-token-loss", 1, 2, more=2, both=("--calculate-per-token-loss",)),
    on_one("interleaved", 1, 2, *INTERLEAVED, more=2, both=("--num-layers", "4")),
    on_one("in-parts-recompute-comm", 2, 2, *COC, "2", *LEVEL2),
    on_one("overlaps", 2, 2, *_OVERLAPS),
    on_one("kernels", 1, 2, *_KERNELS),
    on_one("in-place", 1, 2, "--use-gradient-accumulation-fusion"),
    on_one("context-parallel", 1, 2, *_ULYSSES, more=2),
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
        "resume-from-one-rank",
        flags=(*MODEL, *grid(1, 2)),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(
            flags=(*MODEL, "--tensor-model-parallel-size", "2", *SP), world_size=2, with_feature=False
        ),
    ),
)
