"""Checks of a .bin / .idx pair."""

from __future__ import annotations

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mindspeed_core.errors import DataError
from mindspeed_core.hosts.standalone.data.files import check_dataset_files, largest_token, token_counts

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 2]]


def write(prefix, dtype=np.uint16, documents=DOCUMENTS):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "data")


def damage(path, position, value):
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_a_sound_pair_is_described(tmp_path, dtype):
    files = check_dataset_files(write(tmp_path / "data", dtype))
    assert (files.documents, files.sequences, files.tokens, files.dtype) == (3, 3, 9, np.dtype(dtype))
    assert files.sequence_lengths.tolist() == [3, 1, 5]


def test_token_counts_and_largest_token(prefix):
    assert token_counts(prefix).tolist() == [0, 1, 2, 1, 1, 1, 1, 1, 1]
    assert largest_token(check_dataset_files(prefix)) == 8
    assert largest_token(check_dataset_files(prefix), limit=2) == 2


def test_both_files_missing(tmp_path):
    with pytest.raises(DataError, match=r"neither .*gone\.idx nor .*gone\.bin"):
        check_dataset_files(tmp_path / "gone")


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_one_file_missing(prefix, tmp_path, suffix):
    (tmp_path / f"data.{suffix}").unlink()
    with pytest.raises(DataError, match=rf"data\.{suffix}: is missing"):
        check_dataset_files(prefix)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_path_with_suffix_is_explained(prefix, suffix):
    with pytest.raises(DataError, match="without its suffix"):
        check_dataset_files(f"{prefix}.{suffix}")


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"XX", "not a dataset index"),
        (9, b"\x02", "version 2"),
        (17, b"\x63", "token type 99"),
        (18, b"\x07", "7 sequences"),
        (26, b"\x09", "8 documents"),
    ],
)
def test_a_damaged_header_is_named(prefix, tmp_path, position, value, message):
    damage(tmp_path / "data.idx", position, value)
    with pytest.raises(DataError, match=rf"data\.idx.*{message}"):
        check_dataset_files(prefix)


@pytest.mark.parametrize("size", [0, 5, 20, 60])
def test_a_cut_off_index_is_named(prefix, tmp_path, size):
    content = (tmp_path / "data.idx").read_bytes()
    (tmp_path / "data.idx").write_bytes(content[:size])
    with pytest.raises(DataError, match=r"data\.idx"):
        check_dataset_files(prefix)


@pytest.mark.parametrize(("change", "message"), [(-2, "is cut off"), (2, "belongs to another index")])
def test_a_token_file_of_the_wrong_size_is_named(prefix, tmp_path, change, message):
    content = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "data.bin").write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    with pytest.raises(DataError, match=rf"data\.bin: {message}.*9 tokens"):
        check_dataset_files(prefix)


def test_wrong_document_boundaries_are_named(prefix, tmp_path):
    size = (tmp_path / "data.idx").stat().st_size
    damage(tmp_path / "data.idx", size - 8, b"\x02")
    with pytest.raises(DataError, match="document boundaries"):
        check_dataset_files(prefix)


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(DataError, match="empty"):
        check_dataset_files(write(tmp_path / "data", documents=[]))
