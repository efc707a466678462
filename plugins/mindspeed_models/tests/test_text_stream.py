"""Texts while they grow: whole characters, and nothing that may begin a stop text."""

import pytest

from mindspeed_models.inference.text_stream import TextStream

TEXTS = ["床前明月光,疑是地上霜。", "ok 👩‍👩‍👧‍👦 🇨🇳 done", "plain", "é ü ß"]


def by_bytes(tokens):
    return bytes(tokens).decode("utf-8", errors="replace")


def grown(text, stop=()):
    """Feed a text byte by byte; return the parts and the stream."""
    stream = TextStream(by_bytes, stop)
    tokens = list(text.encode())
    parts = [stream.grow(tokens[:count]) for count in range(1, len(tokens) + 1)]
    return [*parts, stream.grow(tokens, ended=True)], stream


@pytest.mark.parametrize("text", TEXTS)
def test_parts_are_whole_characters_and_together_the_text(text):
    parts, stream = grown(text)
    assert "".join(parts) == text == stream.text
    assert not any("�" in part for part in parts)


def test_half_a_character_at_the_end_is_shown_as_the_tokenizer_shows_it():
    stream = TextStream(by_bytes)
    tokens = list("光".encode())[:2]
    assert stream.grow(tokens) == ""
    assert stream.grow(tokens, ended=True) == by_bytes(tokens)


def test_a_stop_text_ends_the_text_before_it_and_is_never_shown():
    parts, stream = grown("one two\nUser: three", stop=("\nUser:", "nothing"))
    assert "".join(parts) == "one two"
    assert stream.stopped


def test_the_beginning_of_a_stop_text_is_shown_once_it_is_none():
    parts, _ = grown("a\nUse it", stop=("\nUser:",))
    assert "".join(parts) == "a\nUse it"
    # Held until the letter that decides.
    assert "\nUse " in parts


def test_of_several_stop_texts_the_first_in_the_text_counts():
    assert grown("abcd", stop=("cd", "bc"))[1].text == "a"
