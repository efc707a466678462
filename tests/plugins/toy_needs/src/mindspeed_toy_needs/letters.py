"""A tokenizer of letters, with what the host and megatron-core's datasets ask of one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class LetterTokenizer:
    """Ids of the first letters of the alphabet, and one more that ends documents."""

    def __init__(self, letters: int) -> None:
        self.vocab_size = letters + 1
        self.eod = self.eos = letters
        self.pad = -1
        self.unique_identifiers = OrderedDict([("class", "LetterTokenizer"), ("letters", letters)])

    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def detokenize(self, ids: Iterable[int]) -> str:
        return "".join(chr(index + ord("a")) for index in ids)
