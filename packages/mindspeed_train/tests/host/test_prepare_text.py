"""Text files become a dataset, or nothing at all."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_train.text import prepare as module
from mindspeed_train.text.corpus import corpus_documents, write_corpus
from mindspeed_train.text.input import Reading, text_files
from mindspeed_train.text.prepare import (
    command,
    prepare_text,
    read_documents,
    unigram_entropy,
)
from mindspeed_train.text.tokenizer import load_tokenizer

STORY = "Once upon a time there was a small model.\nIt learned to read.\n"


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text(STORY * 3)
    (folder / "a.md").write_text("# Title\n\nnaïve café\n")
    (folder / "deep" / "c.rst").write_text("deep text\n")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden.txt").write_text("hidden")
    return folder


def test_the_dataset_contains_the_documents(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "out" / "data", vocab_size=300)
    tokenizer = load_tokenizer(made.tokenizer)
    dataset = IndexedDataset(made.prefix)
    found = [dataset[i] for i in range(len(dataset))]
    assert all(ids[-1] == tokenizer.eod for ids in found)
    assert [tokenizer.detokenize(ids[:-1]) for ids in found] == [
        "# Title\n\nnaïve café\n",
        STORY * 3,
        "deep text\n",
    ]
    assert (made.documents, made.tokens) == (3, sum(map(len, found)))
    assert made.text_bytes == sum(len(tokenizer.detokenize(ids[:-1]).encode()) for ids in found)


def test_the_same_input_gives_the_same_bytes(texts, tmp_path):
    for name in ("one", "two"):
        prepare_text([texts], tmp_path / name, vocab_size=300)
    for suffix in ("bin", "idx", "tokenizer.json"):
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_a_tokenizer_is_reused(texts, tmp_path):
    first = prepare_text([texts], tmp_path / "one", vocab_size=300)
    second = prepare_text([texts / "deep"], tmp_path / "two", tokenizer=first.tokenizer)
    assert load_tokenizer(second.tokenizer).vocab == load_tokenizer(first.tokenizer).vocab


def test_an_end_token_of_ones_own_goes_with_the_dataset(texts, tmp_path):
    first = prepare_text([texts], tmp_path / "one", vocab_size=300)
    chosen = {"tokenizer": first.tokenizer, "eod_token": "<|pad|>"}
    second = prepare_text([texts], tmp_path / "two", workers=2, **chosen)
    tokenizer = load_tokenizer(second.tokenizer)
    assert tokenizer.eod == load_tokenizer(first.tokenizer).pad
    dataset = IndexedDataset(second.prefix)
    assert [int(dataset[index][-1]) for index in range(len(dataset))] == [tokenizer.eod] * len(dataset)
    again = prepare_text([texts], tmp_path / "two", tokenizer=first.tokenizer, overwrite=True)
    assert load_tokenizer(again.tokenizer).eod == load_tokenizer(first.tokenizer).eod


def test_documents_end_without_a_token_on_request(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "data", vocab_size=300, append_eod=False)
    # The arrays are views into files that the dataset closes when it goes.
    dataset = IndexedDataset(made.prefix)
    assert load_tokenizer(made.tokenizer).eod not in dataset[0]


def test_folders_give_their_text_files_in_order(texts):
    names = [path.relative_to(texts).as_posix() for path in text_files([texts])]
    assert names == ["a.md", "b.txt", "deep/c.rst"]
    assert text_files([texts / "image.png", texts / "image.png"]) == [texts / "image.png"]


def test_missing_input_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt: does not exist"):
        text_files([tmp_path / "gone.txt"])


def test_a_folder_without_text_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no text file.*--suffix"):
        text_files([tmp_path])


def test_documents_split_at_blank_lines_keep_all_words(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("\n\n".join(f"paragraph {i} with words" for i in range(20)))
    documents = list(read_documents([file], Reading(split_documents=60)))
    assert len(documents) > 3
    assert all(len(document) >= 60 for document in documents[:-1])
    assert " ".join(documents).split() == file.read_text().split()


@pytest.fixture
def latin(tmp_path):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"first line\nsecond caf\xe9 line\n")
    return file


def test_a_file_that_is_not_utf8_is_located(latin):
    with pytest.raises(DataError, match=r"latin\.txt: .*0xe9 at offset 21 \(line 2, .*--encoding-errors"):
        list(read_documents([latin], Reading()))


def test_bytes_that_are_not_utf8_can_be_replaced(latin):
    assert list(read_documents([latin], Reading(encoding_errors="replace"))) == [
        "first line\nsecond caf\ufffd line\n"
    ]


def test_files_that_are_not_utf8_can_be_skipped(latin, texts, tmp_path):
    made = prepare_text([latin, texts], tmp_path / "data", vocab_size=300, encoding_errors="skip")
    assert (made.documents, made.skipped) == (3, (str(latin),))


def test_a_failure_leaves_no_dataset_behind(texts, latin, tmp_path):
    with pytest.raises(DataError):
        prepare_text([texts, latin], tmp_path / "data", tokenizer=_tokenizer(texts, tmp_path))
    assert sorted(path.name for path in tmp_path.glob("data*")) == ["data.parts"]


def test_a_failure_keeps_an_older_dataset(texts, latin, tmp_path):
    made = prepare_text([texts], tmp_path / "data", vocab_size=300)
    before = {path: path.read_bytes() for path in tmp_path.glob("data*") if path.is_file()}
    with pytest.raises(DataError):
        prepare_text([texts, latin], made.prefix, tokenizer=made.tokenizer, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.glob("data*") if path.is_file()} == before


def test_a_dataset_of_other_text_is_replaced_on_request_only(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "data", vocab_size=300)
    again = prepare_text([texts], tmp_path / "data", vocab_size=300)
    assert again.tokens == made.tokens
    (texts / "more.txt").write_text("further words of another day\n" * 9)
    before = Path(f"{made.prefix}.bin").read_bytes()
    with pytest.raises(DataError, match=r"--output-prefix .*data\.idx is there already.*--overwrite"):
        prepare_text([texts], tmp_path / "data", vocab_size=300)
    assert Path(f"{made.prefix}.bin").read_bytes() == before
    assert prepare_text([texts], tmp_path / "data", vocab_size=300, overwrite=True).documents > made.documents


def test_a_dataset_that_tells_nothing_of_its_text_is_replaced_on_request_only(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "data", vocab_size=300)
    Path(f"{made.prefix}.source.json").unlink()
    with pytest.raises(DataError, match="--overwrite"):
        prepare_text([texts], tmp_path / "data", vocab_size=300)


def test_the_index_appears_last(texts, tmp_path, monkeypatch):
    order = []
    replace = module.os.replace
    monkeypatch.setattr(module.os, "replace", lambda a, b: (order.append(Path(b).name), replace(a, b)))
    prepare_text([texts], tmp_path / "data", vocab_size=300)
    assert order[-3:] == ["data.tokenizer.json", "data.bin", "data.idx"]


def test_text_without_words_is_refused(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(DataError, match="no text"):
        prepare_text([tmp_path], tmp_path / "data", vocab_size=300)
    assert list(tmp_path.glob("data*")) == []


def test_a_prefix_that_cannot_be_written_is_named(texts, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--output-prefix"):
        prepare_text([texts], tmp_path / "file" / "data", vocab_size=300)


def test_split_size_must_be_positive(texts, tmp_path):
    with pytest.raises(ArgumentError, match="--split-documents"):
        prepare_text([texts], tmp_path / "data", split_documents=0)


def test_unigram_entropy_of_known_frequencies():
    assert unigram_entropy([5, 5, 0, 5, 5]) == pytest.approx(math.log(4))
    assert unigram_entropy([3, 1]) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy([7]) == 0.0
    assert unigram_entropy([]) == 0.0


def test_unigram_entropy_of_a_dataset_is_that_of_its_tokens(texts, tmp_path):
    made = prepare_text([texts], tmp_path / "data", vocab_size=300)
    assert made.unigram_entropy == pytest.approx(unigram_entropy(made.prefix))
    assert 0 < made.unigram_entropy < math.log(made.vocab_size)


def test_the_command_prints_a_summary(texts, tmp_path):
    arguments = [
        str(texts),
        "--output-prefix",
        str(tmp_path / "data"),
        "--vocab-size",
        "300",
        "--suffix",
        "txt",
    ]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    for word in (
        "documents        1",
        "tokens",
        "bytes",
        "vocabulary",
        "nats per token",
        "--tokenizer-model",
    ):
        assert word in result.output


def test_the_command_reports_a_user_error_in_one_line(latin, tmp_path):
    result = CliRunner().invoke(command, [str(latin), "--output-prefix", str(tmp_path / "data")])
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert "offset 21" in result.output


def test_the_corpus_is_english_text_without_repetition(tmp_path, monkeypatch):
    package = tmp_path / "lib"
    (package / "site-packages").mkdir(parents=True)
    (package / "site-packages" / "foreign.py").write_text('"""Not the standard library."""')
    (package / "b.py").write_text('"""Module b."""\n\ndef f():\n    """Does f."""\n')
    comment = "# A comment that is long enough to be worth reading, with several words,\n" * 3
    (package / "a.py").write_text(f'"""Module a."""\n\n{comment}\nclass C:\n    """Module b."""\n')
    (package / "broken.py").write_bytes(b"def \xff")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(package))
    documents = dict(corpus_documents())
    modules = {name: text for name, text in documents.items() if name.startswith("module.")}
    assert list(modules) == ["module.a", "module.b"]
    assert modules["module.a"].startswith("Module a.\n\nModule b.\n\nA comment that is long")
    assert modules["module.b"] == "Does f.\n"
    assert sum(name.startswith("topic.") for name in documents) > 50
    written, size = write_corpus(tmp_path / "corpus")
    assert written == len(documents) == len(text_files([tmp_path / "corpus"]))
    assert size == sum(path.stat().st_size for path in (tmp_path / "corpus").iterdir()) > 300_000


def _tokenizer(texts, tmp_path):
    return prepare_text([texts], tmp_path / "other", vocab_size=300).tokenizer
