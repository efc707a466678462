"""Proofs that documents stay apart: a model trains like one with a dense mask of the data loader."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Resume, Scenario
from mindspeed_cp.algorithms import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ALGO, RING_ALGO, ULYSSES_ALGO
from mindspeed_cp.features.proofs import MODEL, same_model, split_flags

_DENSE = ("--create-attention-mask-in-dataloader",)
_BY_TOKEN = ("--reset-attention-mask",)
_BY_POSITION = (*_BY_TOKEN, "--reset-position-ids", "--eod-mask-loss")
_PP2, _PP4 = (("--pipeline-model-parallel-size", str(stages)) for stages in (2, 4))
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PAIRS = ("--micro-batch-size", "2")
_RING, _FETCHED = split_flags(2, RING_ALGO), split_flags(2, GATHER_ALGO)


DOCUMENT_PROOFS = (
    same_model("documents-ring", _RING, (*MODEL, *_BY_POSITION), _DENSE),
    same_model("documents-ulysses", split_flags(2, ULYSSES_ALGO), (*MODEL, *_BY_POSITION), _DENSE),
    same_model("documents-fetched", _FETCHED, (*MODEL, *_BY_POSITION), _DENSE),
    same_model("documents-pp2", _FETCHED, (*MODEL, *_BY_POSITION, *_PP2), _DENSE, ranks=2),
    same_model("documents-by-token", split_flags(2, ADAPTIVE_ALGO), (*MODEL, *_BY_TOKEN, *_PAIRS), _DENSE),
    same_model("documents-by-token-ring", _RING, (*MODEL, *_BY_TOKEN, "--eod-mask-loss"), _DENSE),
    same_model(
        "documents-by-token-pp2",
        split_flags(2, ULYSSES_ALGO),
        (*MODEL, *_BY_TOKEN, *_PP2, *_PAIRS),
        _DENSE,
        ranks=2,
    ),
    same_model(
        "documents-hybrid",
        split_flags(4, HYBRID_ALGO, "--ulysses-degree-in-cp", "2"),
        (*MODEL, *_BY_TOKEN, "--reset-position-ids"),
        _DENSE,
    ),
    same_model(
        "documents-learned-positions",
        _FETCHED,
        (*MODEL, *_BY_POSITION, "--position-embedding-type", "learned_absolute"),
        _DENSE,
    ),
    # Rotary embeddings know distances only: positions may begin again or not.
    same_model("documents-positions-go-on", _RING, (*MODEL, *_BY_TOKEN), ("--reset-position-ids", *_DENSE)),
    same_model(
        "documents-of-equal-length",
        split_flags(2, ADAPTIVE_ALGO),
        (*MODEL, *_BY_TOKEN, "--fix-sub-seq-length", "5"),
    ),
    same_model(
        "uneven-pp2", (*_RING, "--variable-seq-lengths"), (*MODEL, "--seq-length", "33", *_PP2), ranks=2
    ),
)


def _whole(name: str, documents: tuple[str, ...], *more: str, ranks: int = 1) -> Scenario:
    return Scenario(
        name,
        flags=(*MODEL, *documents, *more),
        baseline=(*MODEL, *documents, *_DENSE, *more),
        world_size=ranks,
        tolerance=2e-5,
        gains=(Gain("peak_bytes"),),
    )


WHOLE_PROOFS = (
    _whole("by-token", _BY_TOKEN, *_PAIRS),
    _whole("by-position", _BY_POSITION),
    _whole("tp2-sp", _BY_TOKEN, *_TP2, ranks=2),
    _whole("pp4", _BY_TOKEN, *_PP4, ranks=4),
    Scenario(
        "resume",
        flags=(*MODEL, *_BY_TOKEN, *_PP2),
        world_size=2,
        tolerance=2e-5,
        resume=Resume(flags=(*MODEL, *_BY_TOKEN, *_TP2), world_size=2),
    ),
)
