"""Text preparation in parts: the same dataset for every number of workers, and after a kill."""

from __future__ import annotations

import fcntl
import json
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_train.data.files import check_dataset_files, token_dtype, write_index
from mindspeed_train.text.prepare import prepare_text

SUFFIXES = ("bin", "idx", "tokenizer.json", "source.json")
OPTIONS = {"vocab_size": 300, "part_bytes": 2000}

KILLED = """
import os, signal, sys
from mindspeed_train.text import prepare as prepare_text, parts as text_parts

made = []
make = text_parts._tokenize
def make_three(*arguments):
    if len(made) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    make(*arguments)
    made.append(arguments)
text_parts._tokenize = make_three
prepare_text.prepare_text([sys.argv[1]], sys.argv[2], vocab_size=300, part_bytes=2000)
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    records = [
        {"text": f"record {number} says: " + "a word or two. " * (number % 7)} for number in range(150)
    ]
    (folder / "big.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for number in range(5):
        (folder / f"small{number}.txt").write_text(f"small text {number}\n" * 20)
    return folder


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    made = prepare_text([texts], tmp_path_factory.mktemp("whole") / "data", **OPTIONS)
    return made, content(made.prefix)


def content(prefix):
    from pathlib import Path

    return [Path(f"{prefix}.{suffix}").read_bytes() for suffix in SUFFIXES]


def test_every_document_is_there(whole):
    made, _ = whole
    assert made.documents == 155
    assert check_dataset_files(made.prefix).documents == 155


def test_the_dataset_does_not_depend_on_the_number_of_workers(texts, whole, tmp_path):
    made = prepare_text([texts], tmp_path / "data", workers=3, **OPTIONS)
    assert content(made.prefix) == whole[1]


def test_the_dataset_does_not_depend_on_the_size_of_parts(texts, whole, tmp_path):
    made = prepare_text([texts], tmp_path / "data", vocab_size=300)
    assert content(made.prefix) == whole[1]


def test_the_progress_bar_reaches_the_whole_input(texts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    prepare_text([texts], tmp_path / "data", **{**OPTIONS, "workers": 2, "progress": True})
    drawn = re.findall(
        r"tokenizing.*?([\d.]+)/([\d.]+)", re.sub(r"\x1b\[[\d;?]*\w", "", capsys.readouterr().err)
    )
    done, whole = drawn[-1]
    assert done == whole


def test_a_killed_run_goes_on_with_the_parts_it_finished(texts, whole, tmp_path):
    command = [sys.executable, "-c", KILLED, str(texts), str(tmp_path / "data")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "data.bin").exists()
    made = prepare_text([texts], tmp_path / "data", **OPTIONS)
    assert made.reused == 3
    assert content(made.prefix) == whole[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"data.{suffix}" for suffix in SUFFIXES)


def test_parts_of_other_input_or_options_are_not_reused(texts, tmp_path):
    bad = tmp_path / "z.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": broken\n')
    tokenizer = prepare_text([texts], tmp_path / "other", **OPTIONS).tokenizer
    options = {"tokenizer": tokenizer, "part_bytes": 2000}
    with pytest.raises(DataError, match=r"z\.jsonl: line 2"):
        prepare_text([texts, bad], tmp_path / "data", **options)
    with pytest.raises(DataError, match=r"z\.jsonl: line 2"):
        prepare_text([texts, bad], tmp_path / "data", append_eod=False, **options)
    bad.write_text('{"text": "fine"}\n{"text": "repaired"}\n')
    made = prepare_text([texts, bad], tmp_path / "data", append_eod=False, **options)
    assert made.documents == 157
    # All but the last part, which holds the repaired file.
    assert made.reused > 5
    again = prepare_text([texts, bad], tmp_path / "data", overwrite=True, **options)
    assert again.reused == 0
    assert again.tokens == made.tokens + 157


def test_an_error_in_a_worker_is_reported_like_one_here(texts, tmp_path):
    for name in ("y", "z"):
        (tmp_path / f"{name}.txt").write_bytes(b"caf\xe9 " * 1000)
    tokenizer = prepare_text([texts], tmp_path / "other", **OPTIONS).tokenizer
    with pytest.raises(DataError, match=r"[yz]\.txt: is not UTF-8"):
        prepare_text(
            [tmp_path / "y.txt", tmp_path / "z.txt"],
            tmp_path / "data",
            tokenizer=tokenizer,
            workers=2,
            part_bytes=99,
        )


def test_two_programs_do_not_write_the_same_dataset(texts, tmp_path):
    folder = tmp_path / "data.parts"
    folder.mkdir()
    with (folder / ".lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another prepare-text"):
            prepare_text([texts], tmp_path / "data", **OPTIONS)


def test_there_is_at_least_one_worker(texts, tmp_path):
    with pytest.raises(ArgumentError, match="--workers"):
        prepare_text([texts], tmp_path / "data", workers=0)


def test_no_torch_is_loaded(texts, tmp_path):
    script = (
        "import sys\n"
        "from mindspeed_train.text.prepare import prepare_text\n"
        f"prepare_text([{str(texts)!r}], {str(tmp_path / 'data')!r}, vocab_size=300)\n"
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("vocabulary", [300, 65499, 65500, 200_000])
def test_the_index_is_the_one_that_megatron_core_writes(tmp_path, vocabulary):
    from megatron.core.datasets.indexed_dataset import DType

    dtype = token_dtype(vocabulary)
    assert dtype == np.dtype(DType.optimal_dtype(vocabulary))
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype.type)
    lengths = [5, 1, 0, 7]
    for length in lengths:
        builder.add_document(list(range(length)), [length])
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_index(tmp_path / "ours.idx", np.asarray(lengths, dtype=np.int32), dtype)
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
