"""Proofs of embedding and loss of a vocabulary: a model trains as without them."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Scenario
from mindspeed_tp.features.grid_proofs import grid
from mindspeed_tp.features.proofs import (
    BOTH_OVERLAPS,
    FULL,
    INTERLEAVED,
    MODEL,
    PLAIN,
    PP2,
    SP,
    TP2,
    as_on_one,
    as_without,
    resumed,
)


def _as_with_masks(name: str, *layout: str, model: tuple[str, ...] = MODEL) -> Scenario:
    """Compare an embedding, which is on without a flag, with megatron-core's: the same bits."""
    flags = (*model, *TP2, *layout)
    baseline = (*flags, "--embedding-with-masks")
    return Scenario(name, flags=flags, baseline=baseline, world_size=2, tolerance=0.0)


EMBEDDING_PROOFS = (
    _as_with_masks("tp2-sp", *SP),
    _as_with_masks("tp2", model=PLAIN),
    _as_with_masks("bf16", *SP, "--bf16"),
    _as_with_masks("deterministic", *SP, "--deterministic-mode"),
    as_on_one("one-process", (), *TP2, *SP, *BOTH_OVERLAPS),
    resumed((), *TP2, *SP, *BOTH_OVERLAPS),
)
_FOUR = ("--lm-loss-chunks", "4")
_LINE = 1e-5
_UNTIED = ("--untie-embeddings-and-output-weights",)
_WIDE = (
    *(*MODEL, "--vocab-size", "2048", "--num-layers", "1"),
    *("--seq-length", "128", "--max-position-embeddings", "128"),
)
"""A vocabulary whose logits are the peak."""
LOSS_PROOFS = (
    as_without("tp2-sp", _FOUR, *TP2, *SP, model=_WIDE, tolerance=_LINE, gains=(Gain("peak_bytes", 0.85),)),
    as_without("one-rank", _FOUR, ranks=1, tolerance=_LINE),
    as_without("tp2-untied", _FOUR, *TP2, *_UNTIED, tolerance=_LINE),
    as_without("bf16", _FOUR, *TP2, *SP, "--bf16", tolerance=3e-2),
    as_without("in-place", _FOUR, *TP2, *SP, "--use-gradient-accumulation-fusion", tolerance=_LINE),
    as_without("pp2", _FOUR, *TP2, *SP, *PP2, ranks=4, tolerance=_LINE),
    as_without("interleaved", _FOUR, *TP2, *SP, *INTERLEAVED, ranks=4, tolerance=_LINE),
    as_without("predictions", _FOUR, *TP2, *SP, "--mtp-num-layers", "1", *_UNTIED, tolerance=_LINE),
    as_without("per-token-loss", _FOUR, "--calculate-per-token-loss", tolerance=_LINE),
    as_on_one("grid", (*grid(1, 2), *_FOUR)),
    as_on_one(
        "uneven",
        (*_FOUR, "--unaligned-linear"),
        *("--tensor-model-parallel-size", "3", *SP),
        ranks=3,
        # A padded vocabulary is trained: it has to be the same on both sides.
        both=("--vocab-size", "126", "--make-vocab-size-divisible-by", "3"),
    ),
    as_on_one("one-process", _FOUR, *TP2, *SP, *BOTH_OVERLAPS, *FULL),
    resumed(_FOUR, *TP2, *SP, *BOTH_OVERLAPS),
)
