"""The tokenizers of the standalone host."""

from __future__ import annotations

import json

import pytest

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_core.hosts.standalone.tokenizer import (
    END_OF_DOCUMENT,
    NullTokenizer,
    load_tokenizer,
    train_tokenizer,
)

TEXT = "the quick brown fox jumps over the lazy dog; the dog sleeps. " * 20


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer([TEXT], 300)


def test_text_comes_back_byte_by_byte(trained):
    text = "the fox \U0001f98a naïve\t\r\n  x"
    assert trained.detokenize(trained.tokenize(text)) == text


def test_training_shortens_frequent_words(trained):
    assert len(trained.tokenize(TEXT)) < len(TEXT) / 2


def test_training_twice_gives_the_same_tokenizer(trained):
    again = train_tokenizer([TEXT], 300)
    assert again.vocab == trained.vocab
    assert again.unique_identifiers == trained.unique_identifiers


def test_saved_tokenizer_loads_with_the_same_ids(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert loaded.tokenize(TEXT) == trained.tokenize(TEXT)
    assert (loaded.eod, loaded.pad, loaded.vocab_size) == (trained.eod, trained.pad, trained.vocab_size)


def test_identity_follows_content_not_place(trained, tmp_path):
    trained.save(tmp_path / "a.json")
    trained.save(tmp_path / "b.json")
    a, b = load_tokenizer(tmp_path / "a.json"), load_tokenizer(tmp_path / "b.json")
    other = train_tokenizer([TEXT], 280)
    assert a.unique_identifiers == b.unique_identifiers == trained.unique_identifiers
    assert a.unique_identifiers != other.unique_identifiers


def test_a_document_cannot_smuggle_in_an_end_of_document(trained):
    ids = trained.tokenize(f"before {END_OF_DOCUMENT} after")
    assert trained.eod not in ids
    assert trained.detokenize(ids) == f"before {END_OF_DOCUMENT} after"


def test_every_id_is_below_the_vocabulary_size(trained):
    assert sorted(trained.inv_vocab) == list(range(trained.vocab_size))
    assert trained.eod != trained.pad


def test_batch_equals_single_texts(trained):
    texts = ["the dog", "", "fox"]
    assert trained.tokenize_batch(texts) == [trained.tokenize(text) for text in texts]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone\.json.*prepare-text"):
        load_tokenizer(tmp_path / "gone.json")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b'{"model": 3}'])
def test_damaged_file_is_named(tmp_path, content):
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.json.*not a tokenizer"):
        load_tokenizer(tmp_path / "bad.json")


def test_tokenizer_without_end_of_document_is_refused(trained, tmp_path):
    trained.save(tmp_path / "t.json")
    content = json.loads((tmp_path / "t.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"] = {
        f"x{key}" if key.startswith("<|") else key: value for key, value in content["model"]["vocab"].items()
    }
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="no end-of-document token"):
        load_tokenizer(tmp_path / "t.json")


def test_vocabulary_needs_room_for_all_bytes():
    with pytest.raises(ArgumentError, match="258"):
        train_tokenizer([TEXT], 257)


def test_null_tokenizer_stays_inside_its_vocabulary():
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.tokenize(tokenizer.detokenize([1, 2, 9])) == [1, 2, 9]
    with pytest.raises(ArgumentError, match="--vocab-size"):
        NullTokenizer(1)
