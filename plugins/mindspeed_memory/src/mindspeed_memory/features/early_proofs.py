"""Proofs of layers that are computed again early: a pipeline trains as without, and waits are used."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Scenario
from mindspeed_memory.features.proofs import (
    BLOCK,
    EXPERTS,
    FUSED_LLAMA,
    INTERLEAVED,
    OVERLAPPED,
    RING,
    SHARDED,
    TP2,
    as_without,
    resumed,
)

_ADVANCE = ("--recompute-in-advance", *BLOCK, "1")
_BUBBLE = ("--recompute-in-bubble",)
_EIGHT = ("--num-layers", "8", "--num-layers-per-virtual-pipeline-stage", "2")
_FLUSH = ("--overlap-p2p-communication-warmup-flush",)


def _counts(early: int, late: int) -> tuple[Gain, ...]:
    return Gain("early recomputations", exactly=early), Gain("late recomputations", exactly=late)


def _layouts(flags: tuple[str, ...]) -> tuple[Scenario, ...]:
    return (
        as_without("warmup-flush", flags, *INTERLEAVED, *_FLUSH, ranks=2, baseline=INTERLEAVED),
        as_without(
            "tp2", flags, *INTERLEAVED, *TP2, ranks=4, model=FUSED_LLAMA, baseline=(*INTERLEAVED, *TP2)
        ),
        as_without("cp2-ring", flags, *INTERLEAVED, *RING, ranks=4, model=FUSED_LLAMA),
        as_without(
            "dp2-overlapped",
            flags,
            *(*INTERLEAVED, *OVERLAPPED),
            ranks=4,
            model=FUSED_LLAMA,
            baseline=(*INTERLEAVED, *SHARDED),
        ),
        as_without("bf16", flags, *INTERLEAVED, "--bf16", ranks=2, model=FUSED_LLAMA),
        as_without(
            "experts",
            flags,
            *("--num-layers", "4"),
            *INTERLEAVED,
            ranks=2,
            model=EXPERTS,
        ),
        resumed(flags, *INTERLEAVED),
    )


ADVANCE_PROOFS = (
    # 4 micro-batches, 2 chunks of one layer: the model's last layer is spared, and no other is late.
    as_without("one-layer", _ADVANCE, *INTERLEAVED, ranks=2, baseline=INTERLEAVED, gains=_counts(12, 0)),
    # Of two layers one is early; of the last chunk one is computed again, in backward.
    as_without(
        "two-layers",
        ("--recompute-in-advance", *BLOCK, "2"),
        *(*INTERLEAVED, *_EIGHT),
        ranks=2,
        baseline=(*INTERLEAVED, *_EIGHT),
        gains=_counts(12, 16),
    ),
    as_without(
        "whole-chunks",
        ("--recompute-in-advance", "--recompute-in-advance-depth", "-1", *BLOCK, "2"),
        *(*INTERLEAVED, *_EIGHT),
        ranks=2,
        baseline=(*INTERLEAVED, *_EIGHT),
        gains=_counts(24, 4),
    ),
    as_without(
        "per-rank",
        (*_ADVANCE, "--enable-recompute-layers-per-pp-rank", "--recompute-norm"),
        *INTERLEAVED,
        ranks=2,
        baseline=INTERLEAVED,
    ),
    as_without(
        "pp4",
        _ADVANCE,
        *("--num-layers", "8", "--pipeline-model-parallel-size", "4"),
        *("--num-layers-per-virtual-pipeline-stage", "1", "--global-batch-size", "8"),
        ranks=4,
        gains=_counts(56, 0),
    ),
    *_layouts(_ADVANCE),
)
BUBBLE_PROOFS = (
    # Rank 0 keeps 5 of 8 passes at most, and 4 with one of them computed again.
    as_without("pp2", _BUBBLE, *INTERLEAVED, ranks=2, gains=(*_counts(1, 0), Gain("forward_bytes", 1.0))),
    as_without(
        "pp4",
        _BUBBLE,
        *("--num-layers", "8", "--pipeline-model-parallel-size", "4"),
        *("--num-layers-per-virtual-pipeline-stage", "1", "--global-batch-size", "8"),
        ranks=4,
        gains=_counts(4, 0),
    ),
    as_without(
        "two-layers",
        (*_BUBBLE, "--recompute-activation-function", "--recompute-norm"),
        *(*INTERLEAVED, *_EIGHT),
        ranks=2,
        baseline=(*INTERLEAVED, *_EIGHT),
        gains=_counts(2, 0),
    ),
    *_layouts(_BUBBLE),
)
