"""Tokenizers for text preparation and for megatron-core's datasets.

A byte-level BPE lives in one ``tokenizer.json`` of the `tokenizers` library, so that it is portable and needs
no model hub. The classes here and in `sentencepiece_tokenizer` offer what megatron-core's datasets and text
preparation ask of a tokenizer and nothing else; importing this module loads neither torch nor megatron-core.
"""

from __future__ import annotations

import hashlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_train.named_files import read_named_file
from mindspeed_train.text.end_token import chosen_token, noted_token, token_named_beside
from mindspeed_train.text.sentencepiece_tokenizer import SentencePieceTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|pad|>"

_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "<eod>", "[EOS]", "[SEP]")
_PADDING_NAMES = (PADDING, "<|padding|>", "<pad>", "[PAD]")
_NO_PADDING = -1
_SMALLEST_VOCABULARY = 256 + 2
_LARGEST_VOCABULARY = 1 << 24
_PANIC = "PanicException"
"""The exception of libraries in Rust where their own code fails; it is no ``Exception``."""


class Tokenizer(Protocol):
    """A tokenizer as megatron-core's datasets use it."""

    eod: int
    pad: int
    unique_identifiers: OrderedDict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Return the number of ids."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""


class TextTokenizer(Tokenizer, Protocol):
    """A tokenizer as text preparation uses it."""

    suffix: str
    eod_token: str | None

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""

    def save(self, path: str | Path) -> None:
        """Write it to a file that `load_tokenizer` reads; ``suffix`` is the end of its name."""


class BpeTokenizer:
    """A trained tokenizer, in the shape that megatron-core's datasets expect.

    Attributes:
        eod: id of the end-of-document token; ``eos`` is its other name.
        eod_token: its name, where that is none of the usual ones.
        pad: id of the padding token, or -1 (megatron-core's "never in the data") when the file has none.
        unique_identifiers: what the dataset index cache depends on: the content of the file, not its place.
    """

    suffix = ".json"

    def __init__(
        self, tokenizer: Any, digest: str, flag: str, source: str, *, eod_token: str | None = None
    ) -> None:
        """Wrap a `tokenizers.Tokenizer` with that digest of its content.

        Args:
            tokenizer: the tokenizer.
            digest: of its content.
            flag: that names its file.
            source: the file; what is beside it may name the end-of-document token.
            eod_token: the end-of-document token, where it is none of the usual ones.

        Raises:
            NamedFileError: it has no end-of-document token; names ``flag`` and its value ``source``.
        """
        self._tokenizer = tokenizer
        # A document that spells out a special token is text, not a document boundary.
        tokenizer.encode_special_tokens = True
        named = eod_token if eod_token is not None or not source else noted_token(Path(source))
        usual = _first_id(tokenizer, _END_NAMES)
        eod: int | None
        if named is not None:
            eod = chosen_token(named, tokenizer.token_to_id, source)
        else:
            # Published models say which of their tokens it is; several of the usual names may be there.
            beside = (
                token_named_beside(Path(source), tokenizer.token_to_id, tokenizer.id_to_token)
                if source
                else None
            )
            eod = usual if beside is None else tokenizer.token_to_id(beside)
            named = None if eod == usual else beside
        if eod is None:
            remedy = (
                f"name it with --eod-token, or add one of {', '.join(_END_NAMES)} to the tokenizer; "
                "tokenizer_config.json and generation_config.json beside it are read too"
            )
            raise NamedFileError(flag, source, "has no end-of-document token", remedy)
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
        if largest >= _LARGEST_VOCABULARY:
            reason = f"has the id {largest}, and a model has a row for each up to the largest"
            raise NamedFileError(flag, source, reason, "make a tokenizer whose ids follow on each other")
        padding = _first_id(tokenizer, _PADDING_NAMES)
        self.eod: int = eod
        self.eos: int = eod
        self.pad: int = _NO_PADDING if padding is None else padding
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            [("class", type(self).__name__), ("sha256", digest)]
        )
        self.eod_token = named
        if named is not None:
            self.unique_identifiers["eod"] = eod

    @property
    def library(self) -> Any:
        """Return the `tokenizers.Tokenizer`."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Return one more than the largest id, special tokens included."""
        return max(self.vocab.values()) + 1

    @property
    def vocab(self) -> dict[str, int]:
        """Return the ids by token."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document token."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts, in parallel where the library can."""
        return [
            encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of a sequence of ids; special tokens are spelled out."""
        text: str = self._tokenizer.decode([int(index) for index in ids], skip_special_tokens=False)
        return text

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json``."""
        Path(path).write_bytes(_content(self._tokenizer))


class NullTokenizer:
    """Ids without text: for made-up samples and for datasets whose tokenizer is not at hand.

    Attributes:
        vocab_size: number of ids.
        eod: the last id; ``eos`` is its other name.
        pad: -1, megatron-core's "never in the data".
        unique_identifiers: what the dataset index cache depends on.
    """

    def __init__(self, vocab_size: int) -> None:
        """Cover the ids 0 to ``vocab_size - 1``.

        Raises:
            ArgumentError: there would be no id beside the end-of-document token.
        """
        if vocab_size < 2:
            raise ArgumentError("--vocab-size", vocab_size, "is too small", "give at least 2")
        self.vocab_size = vocab_size
        self.eod = self.eos = vocab_size - 1
        self.pad = _NO_PADDING
        self.unique_identifiers: OrderedDict[str, Any] = OrderedDict(
            [("class", type(self).__name__), ("vocab_size", vocab_size)]
        )

    def tokenize(self, text: str) -> list[int]:
        """Read ids that are written as numbers with blanks between them."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Iterable[int]) -> str:
        """Write ids as numbers with blanks between them."""
        return " ".join(str(int(index)) for index in ids)


def tokenizer_of(args: Namespace) -> Tokenizer | None:
    """Load the tokenizer that the flags name; None where they name none and ``--vocab-size`` is unknown.

    Raises:
        ArgumentError: flags contradict each other.
        DataError: see `load_tokenizer`.
    """
    kind, model, end = args.tokenizer_type, args.tokenizer_model, getattr(args, "eod_token", None)
    if end is not None and (kind == "NullTokenizer" or not (model or kind == "GPT2BPETokenizer")):
        reason = "names a token of a tokenizer, and no file is given"
        raise ArgumentError("--eod-token", end, reason, "name it with --tokenizer-model")
    if kind == "GPT2BPETokenizer":
        if not args.vocab_file or not args.merge_file:
            raise ArgumentError(
                "--tokenizer-type", kind, "reads two files", "name them with --vocab-file and --merge-file"
            )
        return _load_gpt2(args.vocab_file, args.merge_file, end)
    if kind == "NullTokenizer":
        if args.vocab_size is None:
            raise ArgumentError("--tokenizer-type", kind, "has no vocabulary of its own", "add --vocab-size")
        # Megatron-LM's rule: the end of a document comes on top of the vocabulary that is given.
        return NullTokenizer(args.vocab_size + 1)
    if kind is not None and not model:
        raise ArgumentError("--tokenizer-type", kind, "reads a file", "name it with --tokenizer-model")
    if model:
        return load_tokenizer(model, kind, end)
    return None if args.vocab_size is None else NullTokenizer(args.vocab_size)


def load_tokenizer(
    path: str | Path, kind: str | None = None, eod_token: str | None = None
) -> BpeTokenizer | SentencePieceTokenizer:
    """Load a tokenizer from files.

    Args:
        path: a ``tokenizer.json``, a SentencePiece ``.model``, or a folder with ``tokenizer.json`` or
            ``tokenizer.model``, as saved models have it.
        kind: Megatron-LM's name of the type; by default the file decides.
        eod_token: the end-of-document token, where it is none of the usual ones.

    Raises:
        DataError: the file is missing, damaged or has no end-of-document token.
    """
    file = Path(path)
    pieces = kind in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
    if _is_folder(file):
        named = [file / "tokenizer.json", file / "tokenizer.model"]
        candidates = named[1:] if pieces else named[:1] if kind else named
        path = file = next((candidate for candidate in candidates if candidate.is_file()), candidates[0])
    if pieces or (kind is None and file.suffix == ".model"):
        begins = kind == "Llama2Tokenizer"
        return SentencePieceTokenizer(file, begin_of_document=begins, eod_token=eod_token)
    from tokenizers import Tokenizer as Library

    remedy = "make one with prepare-text, or name an existing tokenizer.json or tokenizer.model"
    content = read_named_file("--tokenizer-model", path, remedy)
    try:
        tokenizer = Library.from_buffer(content)
    except BaseException as error:
        # The library raises a bare Exception for whatever is wrong with the file, or panics.
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        remedy = "copy it again, or make a new one with prepare-text"
        raise NamedFileError(
            "--tokenizer-model", str(file), f"is not a tokenizer.json ({first_line(error)})", remedy
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    return BpeTokenizer(tokenizer, digest, "--tokenizer-model", str(file), eod_token=eod_token)


def _load_gpt2(vocabulary: str, merges: str, eod_token: str | None = None) -> BpeTokenizer:
    """Load GPT-2's byte-level BPE from its two files."""
    from tokenizers import models

    for flag, path in (("--vocab-file", vocabulary), ("--merge-file", merges)):
        read_named_file(flag, path, "check the path")
    try:
        tokenizer = _byte_level(models.BPE.from_file(vocabulary, merges))
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        reason = f"is not a vocabulary that --merge-file {merges!r} belongs to ({first_line(error)})"
        raise NamedFileError("--vocab-file", vocabulary, reason, "check both paths") from error
    # Named as special, so that text which spells it out is not taken for the end of a document.
    known = [name for name in (*_END_NAMES, *_PADDING_NAMES) if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens(known)
    digest = hashlib.sha256(_content(tokenizer)).hexdigest()
    return BpeTokenizer(tokenizer, digest, "--vocab-file", vocabulary, eod_token=eod_token)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Train a byte-level BPE (GPT-2's scheme: every byte is in the vocabulary, no unknown token).

    Args:
        texts: the documents.
        vocab_size: ids wanted, special tokens included; small corpora may give fewer.

    Raises:
        ArgumentError: ``vocab_size`` has no room for all bytes and the special tokens.
    """
    if vocab_size < _SMALLEST_VOCABULARY:
        reason = "has no room for 256 bytes, the end-of-document token and padding"
        raise ArgumentError("--vocab-size", vocab_size, reason, f"give at least {_SMALLEST_VOCABULARY}")
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    digest = hashlib.sha256(_content(tokenizer)).hexdigest()
    return BpeTokenizer(tokenizer, digest, "the trained tokenizer", "")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        # A name that is too long or holds a null byte; reading says what is wrong with it.
        return False


def _byte_level(model: Any) -> Any:
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, pre_tokenizers

    tokenizer = Library(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _content(tokenizer: Any) -> bytes:
    text: str = tokenizer.to_str(pretty=True)
    return text.encode()


def _first_id(tokenizer: Any, names: Sequence[str]) -> int | None:
    for name in names:
        index: int | None = tokenizer.token_to_id(name)
        if index is not None:
            return index
    return None
