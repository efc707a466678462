"""The NumPy index builders against megatron-core's compiled ones."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers_cpp as compiled

from mindspeed_train.data import python_helpers as datasets_python


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    sequence_length=st.integers(2, 17),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    extra=st.sampled_from([0, 1]),
    seed=st.integers(0, 5),
)
@pytest.mark.parametrize("width", ["int32", "int64"])
def test_sample_index_is_identical(width, sizes, sequence_length, epochs, drop_last, extra, seed):
    lengths = np.array([*sizes, 3], dtype=np.int32)
    order = np.tile(np.arange(len(lengths), dtype=np.int32), epochs)
    np.random.RandomState(seed).shuffle(order)
    # megatron-core has no document of length zero at the very end of its last epoch.
    order = np.append(order[order != len(lengths) - 1], np.full(epochs, len(lengths) - 1, dtype=np.int32))
    arguments = (lengths, order, sequence_length, epochs, int(lengths.sum()), drop_last, extra)
    expected = getattr(compiled, f"build_sample_idx_{width}")(*arguments)
    found = datasets_python.build_sample_idx(*arguments, dtype=getattr(np, width))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_the_number_of_samples_is_rounded_like_the_compiled_code_rounds_it():
    lengths = np.array([2**26 + 2], dtype=np.int32)
    arguments = (lengths, np.zeros(1, dtype=np.int32), 2**24, 1, int(lengths[0]), False, 1)
    expected = compiled.build_sample_idx_int32(*arguments)
    np.testing.assert_array_equal(datasets_python.build_sample_idx(*arguments), expected)
    assert len(expected) == 5


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6), size=st.integers(1, 300))
def test_blending_index_is_identical(weights, size):
    shares = (np.array(weights, dtype=np.float64) / sum(weights)).tolist()
    results = []
    for build in (compiled.build_blending_indices, datasets_python.build_blending_indices):
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        build(datasets, samples, shares, len(shares), size, False)
        results.append((datasets, samples))
    np.testing.assert_array_equal(results[0], results[1])


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_exhaustive_blending_index_is_identical(sizes):
    results = []
    for build in (
        compiled.build_exhaustive_blending_indices,
        datasets_python.build_exhaustive_blending_indices,
    ):
        datasets, samples = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
        build(datasets, samples, sizes, len(sizes))
        results.append((datasets, samples))
    np.testing.assert_array_equal(results[0], results[1])


@pytest.fixture
def without_compiled(monkeypatch):
    import megatron.core.datasets as package

    for name in ("helpers_cpp", "helpers"):
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)
    importable = datasets_python.importlib.import_module

    def refuse(name):
        if name.endswith("helpers_cpp"):
            raise ImportError(name)
        return importable(name)

    monkeypatch.setattr(datasets_python.importlib, "import_module", refuse)
    return package


def test_missing_extension_is_replaced_while_datasets_are_built_and_only_then(without_compiled):
    with datasets_python.index_builders() as uses_compiled:
        from megatron.core.datasets import helpers

        index = helpers.build_sample_idx(np.array([5, 6], np.int32), np.array([0, 1], np.int32), 3, 1, 11)
        assert index.dtype == np.int32
        assert index.tolist() == [[0, 0], [0, 3], [1, 1], [1, 4]]
    assert not uses_compiled
    assert "megatron.core.datasets.helpers_cpp" not in sys.modules
    assert not hasattr(without_compiled, "helpers")


def test_compiled_builders_are_used_where_they_exist():
    with datasets_python.index_builders() as uses_compiled:
        assert uses_compiled
        assert sys.modules["megatron.core.datasets.helpers_cpp"] is compiled
