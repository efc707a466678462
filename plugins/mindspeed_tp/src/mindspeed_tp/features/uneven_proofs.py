"""Proofs of uneven tensor parallelism: a model trains as on one process."""

from __future__ import annotations

from typing import Any

from mindspeed_core.feature import Resume, Scenario
from mindspeed_tp.features.proofs import (
    BOTH_OVERLAPS,
    COC,
    FULL,
    INTERLEAVED,
    KERNELS,
    MODEL,
    PLAIN,
    PP2,
    SHARDED,
    SP,
    TP2,
    as_on_one,
)

_SIZES = (
    *("--num-attention-heads", "5", "--hidden-size", "40", "--ffn-hidden-size", "131"),
    *("--seq-length", "33", "--max-position-embeddings", "33"),
)
_MODEL = (*MODEL, *_SIZES)
_UNEVEN = ("--unaligned-linear",)
# A padded vocabulary is trained, and padded to a multiple of the ranks: the same one on both sides.
_THREES = ("--vocab-size", "126", "--make-vocab-size-divisible-by", "3")
_TP3 = ("--tensor-model-parallel-size", "3")
_LEVEL2 = (*FULL, "--optimize-recomp-communication-level", "2")


def _on_one(name: str, *layout: str, flags: tuple[str, ...] = _UNEVEN, **facts: Any) -> Scenario:
    return as_on_one(name, flags, *layout, model=facts.pop("model", _MODEL), **facts)


UNEVEN_PROOFS = (
    _on_one("tp2-sp", *TP2, *SP),
    _on_one("tp2", *TP2),
    _on_one("tp3-sp", *_TP3, *SP, ranks=3, both=_THREES),
    _on_one("biases", *TP2, model=(*PLAIN, *_SIZES)),
    _on_one("biases-rotary-sp", *TP2, *SP, model=(*PLAIN, *_SIZES, "--position-embedding-type", "rope")),
    _on_one(
        "query-groups",
        *(*TP2, *SP),
        both=("--num-attention-heads", "10", "--group-query-attention", "--num-query-groups", "5"),
    ),
    _on_one("distributed-optimizer-overlapped", *TP2, *SP, *BOTH_OVERLAPS, ranks=4),
    _on_one("pp2", *TP2, *SP, *PP2, ranks=4),
    _on_one("interleaved", *TP2, *SP, *INTERLEAVED, ranks=4, both=("--num-layers", "4")),
    _on_one("in-parts", *TP2, *SP, flags=(*_UNEVEN, *COC, "2")),
    _on_one("recompute-comm", *TP2, *SP, flags=(*_UNEVEN, *_LEVEL2)),
    _on_one("recompute-full", *TP2, *SP, *FULL),
    _on_one("kernels", *TP2, *SP, *KERNELS),
    Scenario(
        "bf16",
        flags=(*_MODEL, *TP2, *SP, *_UNEVEN, "--bf16"),
        baseline=(*_MODEL, "--bf16"),
        world_size=2,
        baseline_world_size=1,
        tolerance=5e-2,
        compare=("losses",),
    ),
    _on_one("query-norm", *TP2, *SP, both=("--qk-layernorm",)),
    _on_one("output-gate", *TP2, *SP, both=("--attention-output-gate",)),
    Scenario(
        "resume",
        flags=(*_MODEL, *_THREES, *_TP3, *SP, *_UNEVEN, *SHARDED),
        world_size=3,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_THREES, *SHARDED), world_size=1, with_feature=False),
    ),
    Scenario(
        "resume-on-two-ranks",
        flags=(*_MODEL, *_THREES, *_TP3, *SP, *_UNEVEN, *SHARDED),
        world_size=3,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_THREES, *TP2, *SP, *_UNEVEN, *SHARDED), world_size=2),
    ),
)
