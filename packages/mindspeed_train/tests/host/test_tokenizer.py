"""The tokenizers of the standalone host."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

import pytest

from mindspeed_core.errors import ArgumentError, DataError
from mindspeed_train.text.tokenizer import (
    END_OF_DOCUMENT,
    NullTokenizer,
    load_tokenizer,
    tokenizer_of,
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
    assert sorted(trained.vocab.values()) == list(range(trained.vocab_size))
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


@pytest.fixture
def unusual(trained, tmp_path):
    """A tokenizer that spells its end token in a way of its own: ``x<|endoftext|>``, id 0."""
    trained.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"] = {
        f"x{key}" if key.startswith("<|") else key: value for key, value in content["model"]["vocab"].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tmp_path


UNUSUAL = "x<|endoftext|>"


def test_tokenizer_without_end_of_document_is_refused(unusual):
    with pytest.raises(DataError, match="no end-of-document token"):
        load_tokenizer(unusual)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"eos_token": UNUSUAL}),
        ("tokenizer_config.json", {"eos_token": {"content": UNUSUAL, "lstrip": False}}),
        ("generation_config.json", {"eos_token_id": 0}),
        ("generation_config.json", {"eos_token_id": [0, 5]}),
    ],
)
def test_an_end_token_is_found_in_the_files_beside_a_tokenizer(unusual, name, content):
    (unusual / name).write_text(json.dumps(content))
    assert load_tokenizer(unusual).eod == 0


def test_an_end_token_that_is_named_wins(unusual, trained):
    loaded = load_tokenizer(unusual, eod_token=UNUSUAL)
    assert loaded.eod == 0
    assert loaded.unique_identifiers["eod"] == 0
    trained.save(unusual / "usual.json")
    assert load_tokenizer(unusual / "usual.json", eod_token="<|pad|>").eod == trained.pad


@pytest.mark.parametrize("content", [{"eos_token": "absent"}, {"eos_token": 3}, [], {"eos_token_id": -1}])
def test_files_that_name_no_token_of_the_vocabulary_change_nothing(unusual, content):
    for name in ("tokenizer_config.json", "generation_config.json"):
        (unusual / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match="--eod-token"):
        load_tokenizer(unusual)


def test_a_damaged_file_beside_a_tokenizer_is_named(unusual):
    (unusual / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json.* is no JSON"):
        load_tokenizer(unusual)


def test_a_named_end_token_has_to_be_there(unusual):
    with pytest.raises(DataError, match="--eod-token 'nothing': is no token of"):
        load_tokenizer(unusual, eod_token="nothing")


def test_the_files_beside_a_tokenizer_count_before_the_usual_names(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.eod == trained.pad
    assert loaded.unique_identifiers["eod"] == trained.pad


def test_a_file_that_names_the_usual_token_changes_no_cache(trained, tmp_path):
    trained.save(tmp_path / "tokenizer.json")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [trained.eod, 3]}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.eod == trained.eod
    assert "eod" not in loaded.unique_identifiers


def test_an_end_token_without_a_tokenizer_is_refused():
    given = Namespace(tokenizer_type=None, tokenizer_model=None, vocab_size=9, eod_token="x")
    with pytest.raises(ArgumentError, match="--tokenizer-model"):
        tokenizer_of(given)


def test_vocabulary_needs_room_for_all_bytes():
    with pytest.raises(ArgumentError, match="258"):
        train_tokenizer([TEXT], 257)


def test_null_tokenizer_stays_inside_its_vocabulary():
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.tokenize(tokenizer.detokenize([1, 2, 9])) == [1, 2, 9]
    with pytest.raises(ArgumentError, match="--vocab-size"):
        NullTokenizer(1)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    import sentencepiece

    folder = tmp_path_factory.mktemp("pieces")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 4),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=33,
        minloglevel=2,
        num_threads=1,
    )
    return folder / "tokenizer.model"


def test_a_sentencepiece_model_tokenizes(pieces):
    loaded = load_tokenizer(pieces)
    assert loaded.detokenize(loaded.tokenize("the quick dog")) == "the quick dog"
    assert (loaded.vocab_size, loaded.pad) == (33, -1)
    assert 0 <= loaded.eod < 33
    assert loaded.eod not in loaded.tokenize(TEXT)


def test_llama_2_begins_documents_with_a_token(pieces):
    plain, begun = load_tokenizer(pieces), load_tokenizer(pieces, "Llama2Tokenizer")
    assert begun.tokenize("the dog") == [begun.begin, *plain.tokenize("the dog")]
    assert begun.unique_identifiers != plain.unique_identifiers


def test_a_folder_gives_the_file_that_it_has(pieces, trained, tmp_path):
    assert load_tokenizer(pieces.parent).vocab_size == 33
    trained.save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.model").write_bytes(pieces.read_bytes())
    assert load_tokenizer(tmp_path).vocab_size == trained.vocab_size
    assert load_tokenizer(tmp_path, "GPTSentencePieceTokenizer").vocab_size == 33


def test_a_sentencepiece_model_is_saved_as_it_was(pieces, tmp_path):
    load_tokenizer(pieces).save(tmp_path / "copy.model")
    assert (tmp_path / "copy.model").read_bytes() == pieces.read_bytes()


def test_a_damaged_sentencepiece_model_is_named(tmp_path):
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"bad\.model.*not a SentencePiece model"):
        load_tokenizer(tmp_path / "bad.model")


def test_without_the_library_the_way_out_is_named(pieces, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(DataError, match="pip install sentencepiece"):
        load_tokenizer(pieces)


def flags(**given):
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size")
    return Namespace(**{**dict.fromkeys(names), **given})


def test_gpt2s_two_files_make_a_tokenizer(trained, tmp_path):
    content = json.loads(trained._tokenizer.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in content["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    found = tokenizer_of(
        flags(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(tmp_path / "vocab.json"),
            merge_file=str(tmp_path / "merges.txt"),
        )
    )
    text = f"the quick {END_OF_DOCUMENT} naïve"
    assert found.tokenize(text) == trained.tokenize(text)
    assert (found.eod, found.vocab_size) == (trained.eod, trained.vocab_size)


def test_a_null_tokenizer_that_is_asked_for_adds_the_end_of_a_document():
    found = tokenizer_of(flags(tokenizer_type="NullTokenizer", vocab_size=127))
    assert (found.vocab_size, found.eod) == (128, 127)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "--merge-file"),
        ({"tokenizer_type": "NullTokenizer"}, "--vocab-size"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "--tokenizer-model"),
    ],
)
def test_a_type_without_what_it_reads_is_refused(given, named):
    with pytest.raises(ArgumentError, match=named):
        tokenizer_of(flags(**given))
