"""NumPy versions of the index builders that megatron-core has in C++.

Wheels of megatron-core carry the compiled ``helpers_cpp`` for some platforms only, and a source build on an
aarch64 host may end without it. The functions here give the same arrays bit by bit; `index_builders` puts
them in the place of the missing module while datasets are built, and only then.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType

import numpy as np

_PACKAGE = "megatron.core.datasets"


def build_sample_idx(
    sizes: np.ndarray,
    document_indices: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
    dtype: type[np.signedinteger] = np.int32,
) -> np.ndarray:
    """Find where each sample starts in the stream of documents (megatron-core's ``build_sample_idx``).

    Args:
        sizes: tokens of each document, ``[documents]`` int32.
        document_indices: order of the documents over all epochs, ``[n]`` int32.
        sequence_length: tokens of a sample.
        num_epochs: epochs in ``document_indices``.
        tokens_per_epoch: tokens of one epoch.
        drop_last_partial_sequence: leave out the incomplete sample at the end.
        add_extra_token_to_sequence: 1 when neighbouring samples share one token (labels), else 0.
        dtype: type of the result.

    Returns:
        ``[samples + 1, 2]``: position in ``document_indices`` and offset in that document.
    """
    extra = int(add_extra_token_to_sequence)
    available = num_epochs * tokens_per_epoch - extra
    if drop_last_partial_sequence:
        samples = available // sequence_length
    else:
        # The C++ code divides in single precision; the number of samples has to come out the same.
        samples = math.ceil(np.float32(available) / np.float32(sequence_length))
    lengths = np.asarray(sizes)[document_indices].astype(np.int64)
    ends = np.cumsum(lengths)
    last_tokens = np.arange(1, samples + 1, dtype=np.int64) * sequence_length + extra - 1
    holders = np.searchsorted(ends, last_tokens, side="right")
    beyond = holders >= len(ends)
    holders[beyond] = len(ends) - 1
    offsets = last_tokens + 1 - extra - (ends[holders] - lengths[holders])
    offsets[beyond] = lengths[-1] - extra
    index = np.zeros((samples + 1, 2), dtype=dtype)
    index[1:, 0] = holders
    index[1:, 1] = offsets
    return index


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: Sequence[float],
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Choose for each sample of a blend the dataset that lags most behind its weight.

    Fills both arrays in place.

    Args:
        dataset_index: ``[size]`` int16, the dataset of each sample.
        dataset_sample_index: ``[size]`` int64, the position within it.
        weights: share of each dataset, summing to 1.
        num_datasets: number of datasets.
        size: number of samples.
        verbose: ignored; part of megatron-core's signature.
    """
    shares = np.asarray(weights, dtype=np.float64)[:num_datasets]
    _blend(dataset_index[:size], dataset_sample_index, shares, np.full(num_datasets, size))


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, sizes: Sequence[int], num_datasets: int
) -> None:
    """Mix datasets so that each gives exactly its number of samples; fills both arrays in place.

    Args:
        dataset_index: ``[sum(sizes)]`` int16, the dataset of each sample.
        dataset_sample_index: ``[sum(sizes)]`` int64, the position within it.
        sizes: samples of each dataset.
        num_datasets: number of datasets.
    """
    wanted = np.asarray(sizes, dtype=np.int64)[:num_datasets]
    total = int(wanted.sum())
    _blend(dataset_index[:total], dataset_sample_index, wanted / float(total), wanted)


def _blend(
    dataset_index: np.ndarray, dataset_sample_index: np.ndarray, shares: np.ndarray, wanted: np.ndarray
) -> None:
    taken = np.zeros(len(shares), dtype=np.int64)
    for sample in range(len(dataset_index)):
        lag = shares * max(float(sample), 1.0) - taken
        lag[(taken == wanted) & (taken > 0)] = -np.inf
        chosen = int(np.argmax(lag))
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = taken[chosen]
        taken[chosen] += 1


def has_compiled_helpers() -> bool:
    """Return whether megatron-core's compiled index builders can be imported."""
    try:
        importlib.import_module(f"{_PACKAGE}.helpers_cpp")
    except ImportError:
        return False
    return True


@contextmanager
def index_builders() -> Iterator[bool]:
    """Make ``megatron.core.datasets.helpers`` importable; yields whether the compiled builders are used."""
    if has_compiled_helpers():
        yield True
        return
    package = importlib.import_module(_PACKAGE)
    names = (f"{_PACKAGE}.helpers_cpp", f"{_PACKAGE}.helpers")
    sys.modules[names[0]] = _module(names[0])
    try:
        yield False
    finally:
        for name in names:
            sys.modules.pop(name, None)
            # An import also binds the module in its package.
            vars(package).pop(name.rpartition(".")[2], None)


def _module(name: str) -> ModuleType:
    module = ModuleType(name, "NumPy index builders in the place of the compiled ones.")
    vars(module).update(
        build_sample_idx_int32=partial(build_sample_idx, dtype=np.int32),
        build_sample_idx_int64=partial(build_sample_idx, dtype=np.int64),
        build_blending_indices=build_blending_indices,
        build_exhaustive_blending_indices=build_exhaustive_blending_indices,
    )
    return module
