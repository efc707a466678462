"""``mindspeed-models preprocess``: the same bytes for any workers and after kills, nothing lost silently."""

import json
import os
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from corpora import instructions, question, text, write_lines, write_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mindspeed_core.errors import UserError
from mindspeed_models.data.preprocess import preprocess
from mindspeed_models.data.records import divide, read_records
from mindspeed_models.program import program

RECORDS = 120


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_tokenizer(folder / "tokenizer")
    records = [question(number) for number in range(RECORDS)]
    write_lines(folder / "questions.jsonl", records)
    (folder / "questions.json").write_text(json.dumps(records, indent=1))
    write_lines(
        folder / "texts.jsonl",
        [{"text": text(n, 5 + n % 9), "more": text(-1 - n % 3 + 9, 3)} for n in range(50)],
    )
    return folder


def digests(prefix):
    folder = Path(prefix).parent
    names = sorted(folder.glob(f"{Path(prefix).name}_*"))
    return {
        path.name.removeprefix(Path(prefix).name): sha256(path.read_bytes()).hexdigest() for path in names
    }


def run(*words):
    done = CliRunner().invoke(program, ["preprocess", *map(str, words)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    prefix = str(tmp_path_factory.mktemp("one") / "data")
    made = preprocess([str(corpus / "questions.jsonl")], prefix, instructions(corpus), part_bytes=2000)
    return made, prefix


def test_three_fields_hold_a_sample_each(corpus, alone):
    made, prefix = alone
    fields = {
        name: IndexedDataset(f"{prefix}_packed_{name}_document")
        for name in ("input_ids", "attention_mask", "labels")
    }
    assert {len(each) for each in fields.values()} == {RECORDS}
    assert all(each[0].dtype == np.int32 for each in fields.values())
    assert made.counts.samples == RECORDS
    assert made.counts.tokens == sum(map(len, fields["input_ids"]))
    for ids, mask, labels in zip(*fields.values()):
        assert set(mask) == {1}
        known = labels != -100
        assert (labels[known] == ids[known]).all()
        assert 0 < known.sum() < len(ids)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_bytes_do_not_depend_on_workers(corpus, alone, tmp_path, workers):
    prefix = str(tmp_path / "data")
    source = [str(corpus / "questions.jsonl")]
    preprocess(source, prefix, instructions(corpus), part_bytes=2000, workers=workers)
    assert digests(prefix) == digests(alone[1])


def test_bytes_do_not_depend_on_the_format_nor_on_parts(corpus, alone, tmp_path):
    prefix = str(tmp_path / "data")
    preprocess([str(corpus / "questions.json")], prefix, instructions(corpus), part_bytes=3000)
    assert digests(prefix) == digests(alone[1])
    assert len(divide(corpus / "questions.json", 3000)) == 5


KILLED = """
import os, signal, sys
from mindspeed_models.data import samples
from mindspeed_models.data.preprocess import preprocess
from corpora import instructions
from pathlib import Path
corpus, prefix, left = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
plain = samples.np.save
def save(*given):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(*given)
samples.np.save = save
preprocess([str(corpus / "questions.jsonl")], prefix, instructions(corpus), part_bytes=2000)
"""


def test_a_killed_run_goes_on_and_gives_the_same_bytes(corpus, alone, tmp_path):
    prefix = str(tmp_path / "data")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    for after in (4, 9, 25):
        ended = subprocess.run(
            [sys.executable, "-c", KILLED, str(corpus), prefix, str(after)],
            env=environment,
            capture_output=True,
        )
        assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
        assert not list(tmp_path.glob("*.idx"))
    made = preprocess([str(corpus / "questions.jsonl")], prefix, instructions(corpus), part_bytes=2000)
    assert made.reused > 4
    assert digests(prefix) == digests(alone[1])
    assert not Path(f"{prefix}.parts").exists()


@pytest.mark.parametrize("at", ["bin", "idx"])
def test_a_kill_while_files_appear_leaves_no_index_beside_other_tokens(
    corpus, alone, tmp_path, monkeypatch, at
):
    prefix = str(tmp_path / "data")
    source = [str(corpus / "questions.jsonl")]
    preprocess([str(corpus / "questions.json")], prefix, instructions(corpus, train_on="assistant"))
    plain = os.replace

    def killed(old, new):
        if str(new).endswith(f"_document.{at}"):
            raise KeyboardInterrupt
        plain(old, new)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        preprocess(source, prefix, instructions(corpus), part_bytes=2000, overwrite=True)
    assert not list(tmp_path.glob("*.idx"))
    monkeypatch.undo()
    preprocess(source, prefix, instructions(corpus), part_bytes=2000, overwrite=True)
    assert digests(prefix) == digests(alone[1])


def test_another_dataset_is_not_replaced_silently(corpus, alone, tmp_path):
    prefix = str(tmp_path / "data")
    source = [str(corpus / "questions.jsonl")]
    preprocess(source, prefix, instructions(corpus))
    with pytest.raises(UserError, match="is there already, not made of this text"):
        preprocess(source, prefix, instructions(corpus, train_on="all"))


def test_refused_records_are_kept_with_place_and_reason(corpus, tmp_path):
    records = [question(number) for number in range(20)]
    bad = {"instruction": "q", "input": "", "output": "  "}
    source = write_lines(tmp_path / "some.jsonl", [*records[:9], "{broken", *records[9:], bad, [1]])
    prefix = str(tmp_path / "data")
    with pytest.raises(
        UserError, match=r"3 of 23 records cannot be used, the first in .*some.jsonl, 10: is not JSON"
    ):
        preprocess([str(source)], prefix, instructions(corpus), part_bytes=500)
    assert not list(tmp_path.glob("*.idx"))
    made = preprocess([str(source)], prefix, instructions(corpus), part_bytes=500, max_bad_ratio=0.5)
    assert (made.records, made.refused) == (23, 3)
    told = [json.loads(line) for line in Path(f"{prefix}.rejected.jsonl").read_text().splitlines()]
    assert [(each["place"], each["reason"].partition(" (")[0]) for each in told] == [
        (10, "is not JSON"),
        (22, "an answer is empty"),
        (23, "is list, no object"),
    ]
    assert told[0]["record"] == "{broken"


def test_the_seeds_commands_run(corpus, tmp_path):
    prefix = tmp_path / "alpaca"
    words = (
        f"--input {corpus}/questions.json --output-prefix {prefix} --tokenizer-type PretrainedFromHF "
        f"--tokenizer-name-or-path {corpus}/tokenizer --tokenizer-not-use-fast "
        "--handler-name GeneralInstructionHandler"
    )
    code, output = run(*words.split())
    assert code == 0, output
    assert "records          120" in output
    assert len(list(tmp_path.glob("alpaca_packed_*_document.*"))) == 6
    words = (
        f"--input {corpus}/texts.jsonl --output-prefix {prefix} --dataset-impl mmap --tokenizer-type "
        f"PretrainedFromHF --tokenizer-name-or-path {corpus}/tokenizer --tokenizer-not-use-fast --streaming "
        "--workers 1 --log-interval 100 --append-eod --json-keys text more"
    )
    code, output = run(*words.split())
    assert code == 0, output
    for key in ("text", "more"):
        found = IndexedDataset(f"{prefix}_{key}_document")
        assert len(found) == 50
        assert found[0].dtype == np.uint16


def test_the_seeds_flags_have_its_defaults():
    from mindspeed_models.data.preprocess_command import command

    words = ["--tokenizer-type", "PretrainedFromHF", "--output-prefix", "x"]
    found = command.make_context("preprocess", words).params
    expected = {
        "source": None,
        "handler_name": "",
        "streaming": False,
        "hf_datasets_params": None,
        "datasets": (),
        "json_keys": ("text",),
        "split_sentences": False,
        "keep_newlines": False,
        "tokenizer": None,
        "tokenizer_not_use_fast": False,
        "vocab_file": None,
        "merge_file": None,
        "append_eod": False,
        "seq_length": None,
        "make_vocab_size_divisible_by": 128,
        "pad_vocab_size_to": None,
        "dataset_impl": "mmap",
        "workers": 1,
        "log_interval": 100,
    }
    assert {name: found[name] for name in expected} == expected
    several = command.make_context(
        "preprocess", [*words, "--json-keys", "a", "b", "--datasets", "c", "d", "--append-eod"]
    )
    assert several.params["json_keys"] == ("a", "b")
    assert several.params["datasets"] == ("c", "d")
    assert several.params["append_eod"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--handler-name Nobody", "is unknown"),
        ("--dataset-impl lazy", "use mmap"),
        ("--chat-template chatml", "writes no conversation"),
        ("--train-on all", "writes no conversation"),
        ("--keep-newlines", "add --split-sentences"),
        ("--dataset-format alpaca --split-sentences", "whole conversations"),
        ("--workers 0", "must be at least 1"),
        ("--max-bad-ratio 2", "is no share"),
        ("--pad-vocab-size-to 7", "use as many or more"),
        ("--seq-length 1", "holds no token"),
        ("--json-keys title", "has text, more"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(corpus, tmp_path, words, reason):
    known = f"--input {corpus}/texts.jsonl --output-prefix {tmp_path}/x --tokenizer-type HuggingFaceTokenizer"
    code, output = run(*known.split(), "--tokenizer-name-or-path", corpus / "tokenizer", *words.split())
    assert (code, reason in output) == (1, True), output


def test_input_that_cannot_be_read_is_refused(corpus, tmp_path):
    settings = instructions(corpus)
    (tmp_path / "loader").mkdir()
    (tmp_path / "loader" / "loader.py").write_text("boom")
    (tmp_path / "list.json").write_text('[{"instruction": "a"')
    (tmp_path / "data.bin").write_text("")
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, reason in {
        "absent": "neither a file nor a folder",
        "loader": "is a program",
        "list.json": "is cut off|is not JSON",
        "data.bin": "is none of",
        "empty.jsonl": "no record",
    }.items():
        with pytest.raises(UserError, match=reason):
            preprocess([str(tmp_path / name)], str(tmp_path / "out"), settings)


def test_every_format_gives_the_same_records(corpus, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [question(number) for number in range(10)]
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    header, *lines = [",".join(rows[0])] + [",".join(f'"{value}"' for value in row.values()) for row in rows]
    (tmp_path / "a.csv").write_text("\n".join([header, *lines]) + "\n")
    for name in ("a.jsonl", "a.json", "a.parquet", "a.arrow", "a.csv"):
        found = [
            dict(record.value)
            for part in divide(tmp_path / name, 300)
            for record in read_records(part)
            if record.value
        ]
        assert found == rows, name


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_the_library_is_read_in_blocks(corpus, alone, tmp_path, streaming, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("mindspeed_models.data.hub.BLOCK", 50)
    params = {"path": "json", "data_files": str(corpus / "questions.jsonl"), "streaming": streaming}
    given = tmp_path / "params.json"
    given.write_text(json.dumps(params))
    from mindspeed_models.data.hub import read_params

    params = {**read_params(str(given)), "cache_dir": str(tmp_path / "cache")}
    prefix = str(tmp_path / "data")
    preprocess([], prefix, instructions(corpus), hub=params)
    assert digests(prefix) == digests(alone[1])


def test_params_of_the_library_that_run_programs_are_refused(tmp_path):
    from mindspeed_models.data.hub import read_params

    for content, reason in {
        '{"path": "x", "streaming: True,}': "is no JSON",
        '{"name": "x"}': "no object with a path",
        '{"path": "x.py"}': "is not run here",
        '{"path": "x", "trust_remote_code": true}': "is not run here",
    }.items():
        (tmp_path / "params.json").write_text(content)
        with pytest.raises(UserError, match=reason):
            read_params(str(tmp_path / "params.json"))
