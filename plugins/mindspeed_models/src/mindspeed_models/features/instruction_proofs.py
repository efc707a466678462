"""Proofs of instruction data: a step trains the same, however rows are filled up, packed or laid out."""

from __future__ import annotations

from pathlib import Path

from mindspeed_core.feature import Resume, Scenario

_FILES = ("mindspeed_models.features.instruction_proofs:write_samples",)
_DATA = ("--data-path", "{files}/samples", "--split", "1,0,0", "--is-instruction-dataset")
_VARIABLE, _PACK = ("--variable-seq-lengths",), ("--pack-samples",)
_PP2, _TP2 = (
    ("--pipeline-model-parallel-size", "2"),
    ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
)
_SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
_LONG = ("--seq-length", "128")
_EPOCH = ("--global-batch-size", "8")
"""A step of all samples, one a row."""
_ROWS = ("--global-batch-size", "4")
"""The same samples in packed rows."""
_EXPERTS = tuple(
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --disable-bias-linear "
    "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-token-dispatcher-type alltoall".split()
)


_FURTHER = (
    *("--mtp-num-layers", "2", "--position-embedding-type", "rope"),
    "--untie-embeddings-and-output-weights",
)


def write_samples(folder: Path) -> None:
    """Write eight samples that fill four rows of 128 tokens; a third of each is a prompt."""
    import numpy as np

    from mindspeed_train.interface import write_index

    generator = np.random.RandomState(7)
    # A sample loses a token where labels are shifted.
    lengths = [count + 1 for count in (101, 27, 90, 38, 77, 51, 70, 58)]
    ids = [generator.randint(3, 127, size=length).astype(np.int32) for length in lengths]
    labels = [np.where(np.arange(len(row)) < len(row) // 3, -100, row).astype(np.int32) for row in ids]
    masks = [np.ones(len(row), dtype=np.int32) for row in ids]
    for name, rows in (("input_ids", ids), ("labels", labels), ("attention_mask", masks)):
        prefix = folder / f"samples_packed_{name}_document"
        prefix.with_suffix(".bin").write_bytes(np.concatenate(rows).tobytes())
        write_index(prefix.with_suffix(".idx"), np.asarray(lengths, dtype=np.int32), np.dtype(np.int32))


def _same(
    name: str, flags: tuple[str, ...], baseline: tuple[str, ...], ranks: int = 1, **more: object
) -> Scenario:
    return Scenario(
        name,
        flags=(*_DATA, *_LONG, *flags),
        baseline=(*_DATA, *_LONG, *baseline),
        world_size=ranks,
        baseline_world_size=1,
        same_feature=True,
        files=_FILES,
        tolerance=2e-5,
        **more,  # type: ignore[arg-type]
    )


PROOFS = (
    _same("variable", (*_EPOCH, *_VARIABLE), _EPOCH),
    _same("variable-pp2", (*_EPOCH, *_VARIABLE, *_PP2), _EPOCH, ranks=2),
    _same("variable-tp2-sp", (*_EPOCH, *_VARIABLE, *_TP2), _EPOCH, ranks=2),
    _same(
        "variable-dp2",
        (
            *_EPOCH,
            *_VARIABLE,
            "--use-distributed-optimizer",
            "--overlap-grad-reduce",
            "--overlap-param-gather",
        ),
        _EPOCH,
        ranks=2,
    ),
    _same("experts-pp2", (*_EPOCH, *_VARIABLE, *_EXPERTS, *_PP2), (*_EPOCH, *_EXPERTS), ranks=2),
    _same("experts-tp2-sp", (*_EPOCH, *_EXPERTS, *_TP2), (*_EPOCH, *_VARIABLE, *_EXPERTS), ranks=2),
    _same("further-tokens", (*_EPOCH, *_VARIABLE, *_FURTHER), (*_EPOCH, *_FURTHER)),
    _same("further-tokens-pp2", (*_EPOCH, *_VARIABLE, *_FURTHER, *_PP2), (*_EPOCH, *_FURTHER), ranks=2),
    Scenario(
        "resume",
        flags=(*_DATA, *_LONG, *_ROWS, *_VARIABLE, "--group-by-length"),
        files=_FILES,
        resume=Resume(flags=(*_DATA, *_LONG, *_ROWS, *_VARIABLE, "--group-by-length", *_PP2), world_size=2),
        tolerance=1e-5,
    ),
)

PACKED_PROOFS = (
    Scenario(
        "unpacked",
        flags=(*_DATA, *_LONG, *_ROWS, *_PACK),
        baseline=(*_DATA, *_LONG, *_EPOCH),
        files=_FILES,
        tolerance=1e-5,
    ),
    Scenario(
        "unpacked-further-tokens",
        flags=(*_DATA, *_LONG, *_ROWS, *_PACK, *_FURTHER),
        baseline=(*_DATA, *_LONG, *_EPOCH, *_FURTHER),
        files=_FILES,
        tolerance=1e-5,
    ),
    _same("packed-pp2", (*_ROWS, *_PACK, *_PP2), (*_ROWS, *_PACK), ranks=2),
    _same("packed-tp2-sp", (*_ROWS, *_PACK, *_TP2), (*_ROWS, *_PACK), ranks=2),
    _same(
        "packed-cp2",
        (*_ROWS, *_PACK, "--context-parallel-size", "2", "--use-flash-attn"),
        (*_ROWS, *_PACK),
        ranks=2,
    ),
    _same(
        "packed-experts-cp2",
        (*_ROWS, *_PACK, *_EXPERTS, "--context-parallel-size", "2", "--use-flash-attn"),
        (*_ROWS, *_PACK, *_EXPERTS),
        ranks=2,
    ),
    _same("packed-dp2", (*_ROWS, *_PACK, *_SHARDED), (*_ROWS, *_PACK, "--micro-batch-size", "2"), ranks=2),
    Scenario(
        "resume",
        flags=(*_DATA, *_LONG, *_ROWS, *_PACK),
        files=_FILES,
        resume=Resume(flags=(*_DATA, *_LONG, *_ROWS, *_PACK, *_PP2), world_size=2),
        tolerance=1e-5,
    ),
)
