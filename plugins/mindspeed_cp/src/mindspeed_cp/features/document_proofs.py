"""What proves that documents stay apart: a model trains like one with a dense mask of the data loader."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Scenario
from mindspeed_cp.features.proofs import _MODEL, _split
from mindspeed_cp.options import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ALGO, RING_ALGO, ULYSSES_ALGO

_DENSE = "--create-attention-mask-in-dataloader"
_BY_TOKEN = ("--reset-attention-mask",)
_BY_POSITION = (*_BY_TOKEN, "--reset-position-ids", "--eod-mask-loss")
_PP2, _PP4 = (("--pipeline-model-parallel-size", str(stages)) for stages in (2, 4))
_TP2 = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
_PAIRS = ("--micro-batch-size", "2")


def _split_documents(
    name: str, split: tuple[str, ...], documents: tuple[str, ...], *more: str, ranks: int = 1
) -> Scenario:
    size = int(split[1])
    return Scenario(
        f"documents-{name}",
        flags=(*_MODEL, *documents, *split, *more),
        baseline=(*_MODEL, *documents, _DENSE, *more),
        world_size=size * ranks,
        baseline_world_size=ranks,
        tolerance=2e-5,
    )


DOCUMENT_PROOFS = (
    _split_documents("ring", _split(2, RING_ALGO), _BY_POSITION),
    _split_documents("ulysses", _split(2, ULYSSES_ALGO), _BY_POSITION),
    _split_documents("fetched", _split(2, GATHER_ALGO), _BY_POSITION),
    _split_documents("pp2", _split(2, GATHER_ALGO), _BY_POSITION, *_PP2, ranks=2),
    _split_documents("by-token", _split(2, ADAPTIVE_ALGO), _BY_TOKEN, *_PAIRS),
    _split_documents("by-token-ring", _split(2, RING_ALGO), _BY_TOKEN, "--eod-mask-loss"),
    _split_documents("by-token-pp2", _split(2, ULYSSES_ALGO), _BY_TOKEN, *_PP2, *_PAIRS, ranks=2),
    _split_documents(
        "hybrid", _split(4, HYBRID_ALGO, "--ulysses-degree-in-cp", "2"), (*_BY_TOKEN, "--reset-position-ids")
    ),
    _split_documents(
        "learned-positions",
        _split(2, GATHER_ALGO),
        (*_BY_POSITION, "--position-embedding-type", "learned_absolute"),
    ),
    Scenario(
        # Rotary embeddings know distances only: positions may begin again or not.
        "documents-positions-go-on",
        flags=(*_MODEL, *_BY_TOKEN, *_split(2, RING_ALGO)),
        baseline=(*_MODEL, *_BY_TOKEN, "--reset-position-ids", _DENSE),
        world_size=2,
        baseline_world_size=1,
        tolerance=2e-5,
    ),
    Scenario(
        "documents-of-equal-length",
        flags=(*_MODEL, *_BY_TOKEN, "--fix-sub-seq-length", "5", *_split(2, ADAPTIVE_ALGO)),
        baseline=(*_MODEL, *_BY_TOKEN, "--fix-sub-seq-length", "5"),
        world_size=2,
        baseline_world_size=1,
        tolerance=2e-5,
    ),
    Scenario(
        "uneven-pp2",
        flags=(*_MODEL, "--seq-length", "33", *_PP2, "--variable-seq-lengths", *_split(2, RING_ALGO)),
        baseline=(*_MODEL, "--seq-length", "33", *_PP2),
        world_size=4,
        baseline_world_size=2,
        tolerance=2e-5,
    ),
)


def _whole(name: str, documents: tuple[str, ...], *more: str, ranks: int = 1) -> Scenario:
    return Scenario(
        name,
        flags=(*_MODEL, *documents, *more),
        baseline=(*_MODEL, *documents, _DENSE, *more),
        world_size=ranks,
        tolerance=2e-5,
        gains=(Gain("peak_bytes"),),
    )


WHOLE_PROOFS = (
    _whole("by-token", _BY_TOKEN, *_PAIRS),
    _whole("by-position", _BY_POSITION),
    _whole("tp2-sp", _BY_TOKEN, *_TP2, ranks=2),
    _whole("pp4", _BY_TOKEN, *_PP4, ranks=4),
)
