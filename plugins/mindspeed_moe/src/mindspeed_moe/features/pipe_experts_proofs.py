"""Proofs of pipelined experts: a model trains as with one exchange of a layer and direction."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_moe.features.deepspeed_proofs import DEEPSPEED, NO_DROP, PADDED, ROOMY
from mindspeed_moe.features.proofs import EP2, MODEL, SHARED, TP2

PIPE = ("--use-pipe-experts",)
SLICES = (*PIPE, "--pipe-experts-multi-data", "3")
_APART = ("--pipe-experts-multi-stream",)
_MODEL = (*MODEL, *SHARED, *DEEPSPEED)
_ROWS = (*MODEL, *SHARED)
_SEQUENTIAL = tuple(flag for flag in _MODEL if flag != "--moe-grouped-gemm")
_SEQUENTIAL_ROWS = tuple(flag for flag in _ROWS if flag != "--moe-grouped-gemm")
_SHARDED = ("--use-distributed-optimizer",)
_BOTH_OVERLAPS = (*_SHARDED, "--overlap-grad-reduce", "--overlap-param-gather")
_BF16 = ("--bf16", "--moe-router-dtype", "fp32")
_FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
_RANDOM = ("--moe-router-topk", "1", "--noisy-gate-policy", "RSample")


def _as_without(
    name: str,
    *layout: str,
    flags: tuple[str, ...] = PIPE,
    model: tuple[str, ...] = _MODEL,
    ranks: int = 2,
    tolerance: float = 1e-5,
    gains: tuple[Gain, ...] = (),
) -> Scenario:
    """Compare a model to the same one that exchanges all experts at once, on the same ranks."""
    both = (*model, *EP2, *layout)
    return Scenario(
        name,
        flags=(*both, *flags),
        baseline=both,
        world_size=ranks,
        tolerance=tolerance,
        gains=gains,
    )


PIPE_EXPERTS_PROOFS = (
    _as_without("ep2", gains=(Gain("sent_bytes", 1.0),)),
    _as_without("slices", flags=SLICES),
    _as_without("sequential-experts", flags=SLICES, model=_SEQUENTIAL),
    _as_without("distributed-optimizer-overlapped", *_BOTH_OVERLAPS),
    _as_without("bf16", *_BF16, tolerance=1e-2),
    _as_without("one-choice-at-random", *_RANDOM),
    _as_without("no-drop", *PADDED[2:], flags=SLICES),
    _as_without("recompute-full", *_FULL),
    _as_without("recompute-moe", "--recompute-granularity", "selective", "--recompute-modules", "moe"),
    _as_without("tp2-whole-experts", *TP2, "--expert-tensor-parallel-size", "1"),
    _as_without("tp2-cut-experts", *TP2, ranks=4),
    _as_without("tp2-apart", *TP2, ranks=4, flags=(*SLICES, *_APART)),
    _as_without("pp2", "--pipeline-model-parallel-size", "2", ranks=4),
    _as_without(
        "interleaved",
        *("--num-layers", "4", "--pipeline-model-parallel-size", "2"),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
        ranks=4,
    ),
    _as_without("per-token-loss", "--calculate-per-token-loss"),
    _as_without(
        "cp2",
        "--context-parallel-size",
        "2",
        "--position-embedding-type",
        "rope",
        model=(*_MODEL, *ROOMY[2:]),
    ),
    _as_without("rows", model=_ROWS, gains=(Gain("sent_bytes", 1.0),)),
    _as_without("rows-sequential-experts", model=_SEQUENTIAL_ROWS),
    _as_without("rows-distributed-optimizer-overlapped", *_BOTH_OVERLAPS, model=_ROWS),
    _as_without("rows-bf16", *_BF16, model=_ROWS, tolerance=2e-2),
    _as_without("rows-capacity", "--moe-expert-capacity-factor", "1.0", model=_ROWS),
    _as_without("rows-recompute-full", *_FULL, model=_ROWS),
    _as_without("rows-tp2", *TP2, "--expert-tensor-parallel-size", "1", model=_ROWS),
    _as_without("rows-tp2-cut-experts", *TP2, model=_ROWS, ranks=4),
    _as_without("rows-tp2-apart", *TP2, model=_ROWS, ranks=4, flags=(*PIPE, *_APART)),
    _as_without("rows-no-drop", model=(*_ROWS, *NO_DROP)),
    _as_without("rows-pp2", "--pipeline-model-parallel-size", "2", model=_ROWS, ranks=4),
    Scenario(
        "rows-resume",
        flags=(*_ROWS, *EP2, *_BOTH_OVERLAPS, *PIPE),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_ROWS, *_SHARDED), world_size=1, with_feature=False),
    ),
    Scenario(
        "one-process",
        flags=(*_MODEL, *EP2, *SLICES),
        baseline=_MODEL,
        world_size=2,
        baseline_world_size=1,
        tolerance=1e-5,
    ),
    Scenario(
        "resume",
        flags=(*_MODEL, *EP2, *_BOTH_OVERLAPS, *PIPE),
        world_size=2,
        tolerance=1e-5,
        resume=Resume(flags=(*_MODEL, *_SHARDED), world_size=1, with_feature=False),
    ),
)
