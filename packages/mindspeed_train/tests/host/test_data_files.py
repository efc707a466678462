"""Checks of a .bin / .idx pair."""

from __future__ import annotations

import json

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mindspeed_core.errors import DataError
from mindspeed_train.data.files import check_dataset_files, largest_token, token_counts
from mindspeed_train.data.identity import TrainingData, check_unchanged, digest_of

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


def pointer(at):
    return 34 + 3 * 4 + at * 8


def boundary(at):
    return pointer(3) + at * 8


WRONG = {
    "a flipped bit in a pointer": (pointer(1), b"\x07", "sequence 1 should begin at byte 6, .* says 7"),
    "a pointer beyond the file": (pointer(2), b"\xff\xff\xff\xff", "sequence 2 should begin at byte 8"),
    "a pointer of zero": (pointer(1), bytes(8), "sequence 1 should begin at byte 6, .* says 0"),
    "swapped lengths": (34, b"\x01\0\0\0\x03\0\0\0", "sequence 1 should begin at byte 2, .* says 6"),
    "a negative length": (34, b"\xff\xff\xff\xff", "a sequence has -1 tokens"),
    "a document that begins late": (boundary(0), b"\x01", "the first document begins at sequence 1"),
    "a document that ends before it begins": (boundary(1), b"\x03", "a document ends before it begins"),
    "a document of the past": (boundary(2), b"\xff" * 8, "a document ends before it begins"),
}


@pytest.mark.parametrize("damaged", WRONG)
def test_a_field_of_the_index_that_contradicts_another_is_refused(prefix, tmp_path, damaged):
    position, value, words = WRONG[damaged]
    damage(tmp_path / "data.idx", position, value)
    with pytest.raises(DataError, match=rf"data\.idx: {words}"):
        check_dataset_files(prefix)


def test_every_flipped_bit_of_an_index_is_found_or_means_the_same(prefix, tmp_path):
    path = tmp_path / "data.idx"
    content = path.read_bytes()
    unseen = []
    for position in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            try:
                check_dataset_files(prefix)
            except DataError:
                continue
            unseen.append((position, bit))
    # Which sequences make up a document cannot be known from anything else.
    inner = range(boundary(1), boundary(3))
    # The type may be another of the same width; that its ids fit is compared with the tokenizer.
    assert [place for place in unseen if place[0] not in inner and place[0] != 17] == []


def test_data_check_tells_what_a_dataset_is_and_whether_it_is_whole(prefix, tmp_path, capsys):
    from mindspeed_train.program import main

    assert main(["data", "check", str(prefix), "--full", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["documents"], found["largest_id"]) == (9, 3, 8)
    damage(tmp_path / "data.idx", pointer(1), b"\x07")
    assert main(["data", "check", str(prefix)]) == 1
    assert "should begin at byte 6" in capsys.readouterr().out


def test_the_digest_of_a_dataset_changes_with_each_file(prefix, tmp_path):
    before = digest_of(str(prefix)), digest_of(str(prefix), full=True)
    damage(tmp_path / "data.bin", 4, b"\x09")
    assert digest_of(str(prefix)) != before[0]
    assert digest_of(str(prefix), full=True) != before[1]


def test_other_training_data_are_refused_by_name_unless_they_are_allowed():
    def record(digest="a", weight=1.0, split="9,1"):
        return {"train": [{"prefix": "x", "digest": digest, "weight": weight}], "split": split}

    data = TrainingData(record(), record(), "iter_0000002")
    assert check_unchanged(data, allowed=False) == ""
    for other, words in (
        (record(digest="b"), "the content of x"),
        (record(weight=2.0), "the weight of x, 2.0 then, 1.0 now"),
        (record(split="8,2"), "--split, 8,2 then, 9,1 now"),
        ({"train": []}, "0 datasets then, 1 now"),
    ):
        data = TrainingData(record(), other, "iter_0000002")
        with pytest.raises(DataError, match=rf"iter_0000002: .*{words}.*--allow-other-data"):
            check_unchanged(data, allowed=False)
        assert words in check_unchanged(data, allowed=True)
