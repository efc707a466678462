"""What proves that documents stay apart: a model trains like one with a dense mask of the data loader."""

from __future__ import annotations

from mindspeed_core.feature import Gain, Scenario
from mindspeed_cp.algorithms import ADAPTIVE_ALGO, GATHER_ALGO, HYBRID_ALGO, RING_ALGO, ULYSSES_ALGO
from mindspeed_cp.features.proofs import MODEL, split_flags

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
        flags=(*MODEL, *documents, *split, *more),
        baseline=(*MODEL, *documents, _DENSE, *more),
        world_size=size * ranks,
        baseline_world_size=ranks,
        tolerance=2e-5,
    )


DOCUMENT_PROOFS = (
    _split_documents("ring", split_flags(2, RING_ALGO), _BY_POSITION),
    _split_documents("ulysses", split_flags(2, ULYSSES_ALGO), _BY_POSITION),
    _split_documents("fetched", split_flags(2, GATHER_ALGO), _BY_POSITION),
    _split_documents("pp2", split_flags(2, GATHER_ALGO), _BY_POSITION, *_PP2, ranks=2),
    _split_documents("by-token", split_flags(2, ADAPTIVE_ALGO), _BY_TOKEN, *_PAIRS),
    _split_documents("by-token-ring", split_flags(2, RING_ALGO), _BY_TOKEN, "--eod-mask-loss"),
    _split_documents("by-token-pp2", split_flags(2, ULYSSES_ALGO), _BY_TOKEN, *_PP2, *_PAIRS, ranks=2),
    _split_documents(
        "hybrid",
        split_flags(4, HYBRID_ALGO, "--ulysses-degree-in-cp", "2"),
        (*_BY_TOKEN, "--reset-position-ids"),
    ),
    _split_documents(
        "learned-positions",
        split_flags(2, GATHER_ALGO),
        (*_BY_POSITION, "--position-embedding-type", "learned_absolute"),
    ),
    Scenario(
        # Rotary embeddings know distances only: positions may begin again or not.
        "documents-positions-go-on",
        flags=(*MODEL, *_BY_TOKEN, *split_flags(2, RING_ALGO)),
        baseline=(*MODEL, *_BY_TOKEN, "--reset-position-ids", _DENSE),
        world_size=2,
        baseline_world_size=1,
        tolerance=2e-5,
    ),
    Scenario(
        "documents-of-equal-length",
        flags=(*MODEL, *_BY_TOKEN, "--fix-sub-seq-length", "5", *split_flags(2, ADAPTIVE_ALGO)),
        baseline=(*MODEL, *_BY_TOKEN, "--fix-sub-seq-length", "5"),
        world_size=2,
        baseline_world_size=1,
        tolerance=2e-5,
    ),
    Scenario(
        "uneven-pp2",
        flags=(*MODEL, "--seq-length", "33", *_PP2, "--variable-seq-lengths", *split_flags(2, RING_ALGO)),
        baseline=(*MODEL, "--seq-length", "33", *_PP2),
        world_size=4,
        baseline_world_size=2,
        tolerance=2e-5,
    ),
)


def _whole(name: str, documents: tuple[str, ...], *more: str, ranks: int = 1) -> Scenario:
    return Scenario(
        name,
        flags=(*MODEL, *documents, *more),
        baseline=(*MODEL, *documents, _DENSE, *more),
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
