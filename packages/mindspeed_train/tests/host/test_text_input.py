"""Documents out of text, JSON lines, Parquet and gzip; what cannot be read is named with its line."""

from __future__ import annotations

import gzip
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest

from mindspeed_core.errors import DataError
from mindspeed_train.text.input import Reading, read_segment, segments_of, text_files

RECORDS = [{"text": f"document {number} " + "é" * number, "title": f"title {number}"} for number in range(40)]
TEXTS = [record["text"] for record in RECORDS]


def read(file, size=1 << 20, skipped=None, **how):
    reading = Reading(**how)
    skipped = [] if skipped is None else skipped
    return [text for segment in segments_of(file, size) for text in read_segment(segment, reading, skipped)]


def lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


@pytest.fixture
def jsonl(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_bytes(lines(RECORDS))
    return file


@pytest.fixture
def parquet(tmp_path):
    file = tmp_path / "records.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), file, row_group_size=7)
    return file


@pytest.mark.parametrize("size", [1, 50, 51, 52, 53, 200, 1 << 20])
def test_each_line_is_read_once_however_the_file_is_divided(jsonl, size):
    assert read(jsonl, size) == TEXTS


def test_the_segments_cover_the_file(jsonl):
    segments = segments_of(jsonl, 100)
    assert len(segments) > 10
    assert sum(segment.size for segment in segments) == jsonl.stat().st_size


@pytest.mark.parametrize("size", [1, 300, 1 << 20])
def test_parquet_is_read_by_row_groups(parquet, size):
    assert read(parquet, size) == TEXTS
    assert sum(segment.size for segment in segments_of(parquet, size)) <= parquet.stat().st_size


def test_compressed_files_are_read_by_their_inner_suffix(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS)))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"plain\ntext\n"))
    files = text_files([tmp_path])
    assert [file.name for file in files] == ["a.jsonl.gz", "b.txt.gz"]
    assert read(files[0]) == TEXTS
    assert read(files[1]) == ["plain\ntext\n"]


def test_several_keys_give_a_document_each(jsonl, parquet):
    expected = [record[key] for record in RECORDS for key in ("title", "text")]
    assert read(jsonl, json_keys=("title", "text")) == expected
    assert read(parquet, json_keys=("title", "text")) == expected


def test_empty_lines_and_a_missing_last_newline_are_no_errors(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n\n  \n{"text": " "}\n{"text": "two"}')
    assert read(tmp_path / "a.jsonl") == ["one", "two"]


@pytest.mark.parametrize("size", [30, 1 << 20])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "x"]\n', r"line 4: is not JSON"),
        (b'{"body": "x"}\n', r"line 4: has no text under 'text' \(found 'body'\).*--json-keys"),
        (b'{"text": 7}\n', r"line 4: has no text under 'text'"),
        (b'["text"]\n', r"line 4: has no text under 'text' \(found list\)"),
        (b'{"text": "caf\xe9"}\n', r"line 4: is not UTF-8: byte 0xe9 at column 14.*--encoding-errors"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path, line, message, size):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(RECORDS[:3]) + line + lines(RECORDS[3:5]))
    with pytest.raises(DataError, match=rf"a\.jsonl: {message}"):
        read(file, size)


def test_a_last_line_that_is_cut_off_is_named(jsonl):
    jsonl.write_bytes(jsonl.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"line 40: is (cut off|not UTF-8)"):
        read(jsonl)


def test_lines_that_are_not_utf8_can_be_skipped_or_replaced(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(lines(RECORDS[:1]) + b'{"text": "caf\xe9"}\n' + lines(RECORDS[1:2]))
    skipped = []
    assert read(file, skipped=skipped, encoding_errors="skip") == TEXTS[:2]
    assert skipped == [f"{file}: line 2"]
    assert read(file, encoding_errors="replace")[1] == "caf\ufffd"


def test_a_compressed_file_that_is_cut_off_is_named_with_its_line(tmp_path):
    whole = gzip.compress(b'{"text": "one"}\n' * 3)
    (tmp_path / "a.jsonl.gz").write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"a\.jsonl\.gz: is cut off or damaged after line 3"):
        read(tmp_path / "a.jsonl.gz")
    (tmp_path / "b.txt.gz").write_bytes(b"not compressed")
    with pytest.raises(DataError, match=r"b\.txt\.gz: is cut off or damaged after line 0"):
        read(tmp_path / "b.txt.gz")


def test_a_parquet_file_that_is_cut_off_is_named(parquet):
    parquet.write_bytes(parquet.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"records\.parquet: is not a Parquet file, or is cut off"):
        read(parquet)


def test_a_damaged_row_group_is_named_with_its_row(parquet):
    source = pyarrow.parquet.ParquetFile(parquet)
    column = source.metadata.row_group(2).column(0)
    content = bytearray(parquet.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    parquet.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"is damaged behind row 14"):
        read(parquet)


def test_a_missing_column_and_a_row_without_text_are_named(parquet, tmp_path):
    with pytest.raises(DataError, match=r"has no column 'body' \(found 'text', 'title'\).*--json-keys"):
        read(parquet, json_keys=("body",))
    table = pyarrow.Table.from_pylist([{"text": "one"}, {"text": None}])
    pyarrow.parquet.write_table(table, tmp_path / "null.parquet")
    with pytest.raises(DataError, match="row 2: 'text' is NoneType"):
        read(tmp_path / "null.parquet")


def test_without_pyarrow_the_way_out_is_named(parquet, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match="pip install pyarrow"):
        read(parquet)
