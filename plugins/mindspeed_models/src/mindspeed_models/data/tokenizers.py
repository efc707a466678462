"""Tokenizers of data preparation: the ids of texts in which users may have written anything.

One object for every kind: a text is content, in which no special token is recognized, but for the spans that
a chat template has written. Loading needs neither torch nor megatron-core.
"""

from __future__ import annotations

import hashlib
import json
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_core.errors import ArgumentError, NamedFileError, UserError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_train.interface import BpeTokenizer, tokenizer_of

FROM_HF = "PretrainedFromHF"
BERT = ("BertWordPieceLowerCase", "BertWordPieceCase")
TYPES = (
    FROM_HF,
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    *BERT,
)
_FOLDER = "--tokenizer-name-or-path"
_CONFIG = "tokenizer_config.json"

Span = tuple[int, int]


@dataclass(frozen=True)
class TokenizerChoice:
    """The tokenizer that the flags name.

    Attributes:
        kind: ``--tokenizer-type``.
        path: ``--tokenizer-name-or-path``, or ``--tokenizer-model``.
        fast: False with ``--tokenizer-not-use-fast``.
        vocab_file: of `GPT2BPETokenizer`.
        merge_file: likewise.
        eod_token: the token that ends documents, where it is not the tokenizer's own.
        bos: begin texts with the tokenizer's first token, where it has one.
    """

    kind: str | None = None
    path: str | None = None
    fast: bool = True
    vocab_file: str | None = None
    merge_file: str | None = None
    eod_token: str | None = None
    bos: bool = True


@dataclass
class TextEncoder:
    """Turns texts into ids.

    Attributes:
        library: the `tokenizers.Tokenizer`; None for SentencePiece.
        plain: encodes whole texts without special tokens, where there is no library.
        vocab_size: number of ids.
        eod: the id that ends documents.
        before: ids that the tokenizer puts before a text.
        after: and behind it.
        special: ids of the special tokens by their spelling.
        identity: what the ids depend on: a digest of the tokenizer's content and options.
        chat_template: the template that came with the tokenizer; empty for none.
        names: spellings of ``bos_token``, ``eos_token`` …, which templates use.
    """

    library: Any
    plain: Any
    vocab_size: int
    eod: int
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    special: Mapping[str, int] = field(default_factory=dict)
    identity: str = ""
    chat_template: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Prepare the search for special tokens."""
        longest_first = sorted(self.special, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._continued: Any = None

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of whole texts, none of which is a special token, with those around them."""
        if self.library is None:
            encoded: list[list[int]] = self.plain.tokenize_batch(texts)
            return encoded
        self.library.encode_special_tokens = True
        found = self.library.encode_batch(list(texts), add_special_tokens=False)
        return [[*self.before, *encoding.ids, *self.after] for encoding in found]

    def written(
        self, text: str, content: Sequence[Span], cuts: Sequence[int] = ()
    ) -> tuple[list[int], list[Span]]:
        """Return ids and character spans of a text that a template has written around contents.

        Args:
            text: the whole text.
            content: what users and models said, in order; no special token is recognized there.
            cuts: places that no token spans, ascending.

        Raises:
            UserError: the tokenizer does not say which characters a token stands for.
        """
        if self.library is None:
            raise UserError(
                "conversations need a tokenizer that knows which characters a token stands for, which "
                "SentencePiece's own files do not say: name a folder with tokenizer.json"
            )
        spelled = [] if self._found is None else list(self._found.finditer(text))
        outside = [found for found in spelled if not _touches(found.span(), content)]
        if len(outside) == len(spelled) and not cuts:
            self.library.encode_special_tokens = False
            encoding = self.library.encode(text, add_special_tokens=False)
            return list(encoding.ids), list(encoding.offsets)
        markers = [found.span() for found in outside]
        inside = [(cut, cut) for cut in cuts if not any(begin < cut < end for begin, end in markers)]
        return self._around(text, sorted([*markers, *inside]))

    def _around(self, text: str, markers: Sequence[Span]) -> tuple[list[int], list[Span]]:
        """Encode piece by piece: markers are special tokens, or empty; everything between them is text."""
        ids: list[int] = []
        offsets: list[Span] = []
        at = 0
        for begin, end in [*markers, (len(text), len(text))]:
            if begin > at:
                library = self.library if at == 0 else self._behind_first()
                library.encode_special_tokens = True
                encoding = library.encode(text[at:begin], add_special_tokens=False)
                ids += encoding.ids
                offsets += [(first + at, last + at) for first, last in encoding.offsets]
            if end > begin:
                ids.append(self.special[text[begin:end]])
                offsets.append((begin, end))
            at = end
        return ids, offsets

    def _behind_first(self) -> Any:
        """Return the tokenizer for a piece that does not begin the text: no blank goes before it."""
        if self._continued is None:
            content = self.library.to_str()
            changed = content.replace('"prepend_scheme":"first"', '"prepend_scheme":"never"')
            self._continued = self.library if changed == content else type(self.library).from_str(changed)
        return self._continued


def load_encoder(choice: TokenizerChoice) -> TextEncoder:
    """Load the tokenizer that flags name.

    Raises:
        UserError: files are missing or damaged, or the type cannot be used.
    """
    if choice.kind in BERT:
        raise ArgumentError(
            "--tokenizer-type", choice.kind, "BERT is not trained here", f"use one of {', '.join(TYPES[:6])}"
        )
    if choice.kind == FROM_HF:
        return _from_hf(choice)
    if choice.path is None and choice.kind != "GPT2BPETokenizer":
        raise ArgumentError(_FOLDER, None, "no tokenizer is named", "name a folder with tokenizer.json")
    found = tokenizer_of(
        Namespace(
            tokenizer_type=choice.kind,
            tokenizer_model=choice.path,
            vocab_file=choice.vocab_file,
            merge_file=choice.merge_file,
            eod_token=choice.eod_token,
            vocab_size=None,
        )
    )
    assert found is not None
    identity = json.dumps([found.unique_identifiers, choice.bos])
    if not isinstance(found, BpeTokenizer):
        return TextEncoder(None, found, found.vocab_size, found.eod, identity=identity)
    beside = _read_config(_config_of(choice.path))
    return _encoder(found.library, found.vocab_size, found.eod, identity, beside, choice)


def encoder_around(tokenizer: Any, folder: str | Path | None) -> TextEncoder:
    """Return the encoder of a tokenizer that a host has loaded.

    Args:
        tokenizer: of the host.
        folder: where ``tokenizer_config.json`` may be, which spells the special tokens of templates.
    """
    identity = json.dumps(list(tokenizer.unique_identifiers.items()))
    if not isinstance(tokenizer, BpeTokenizer):
        return TextEncoder(None, tokenizer, tokenizer.vocab_size, tokenizer.eod, identity=identity)
    beside = {} if folder is None else _read_config(_config_of(str(folder)))
    return _encoder(
        tokenizer.library, tokenizer.vocab_size, tokenizer.eod, identity, beside, TokenizerChoice()
    )


def _from_hf(choice: TokenizerChoice) -> TextEncoder:
    """Load what ``transformers`` saves, with its own rules for old files; nothing is downloaded or run."""
    if choice.path is None:
        raise ArgumentError("--tokenizer-type", choice.kind, "reads a folder", f"name it with {_FOLDER}")
    folder = Path(choice.path)
    if not folder.is_dir():
        raise NamedFileError(_FOLDER, choice.path, "is no folder", "name one that holds a saved tokenizer")
    config = _read_config(folder / _CONFIG)
    if config.get("auto_map"):
        reason = "its tokenizer is a program of its own (auto_map), which is not run here"
        raise NamedFileError(_FOLDER, choice.path, reason, "save it as tokenizer.json, which needs none")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            f"--tokenizer-type {FROM_HF} needs transformers; run pip install 'mindspeed-models[hf]'"
        ) from error
    # Files of the first LLaMA misspell the class.
    named = {"tokenizer_type": "llama"} if config.get("tokenizer_class") == "LLaMATokenizer" else {}
    try:
        loaded: Any = AutoTokenizer.from_pretrained(
            choice.path, use_fast=choice.fast, local_files_only=True, trust_remote_code=False, **named
        )
    except Exception as error:
        # Whatever is wrong with one of its files.
        reason = f"holds no tokenizer that can be read ({first_line(error)})"
        raise NamedFileError(
            _FOLDER, choice.path, reason, "check tokenizer.json and tokenizer_config.json"
        ) from error
    library = getattr(loaded, "backend_tokenizer", None)
    if library is None:
        reason = f"{type(loaded).__name__} does not say which characters a token stands for"
        raise NamedFileError(_FOLDER, choice.path, reason, "save it with a fast tokenizer as tokenizer.json")
    names = {name: value for name, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    token = choice.eod_token or names.get("eos_token")
    eod = None if token is None else library.token_to_id(token)
    if eod is None:
        reason = "has no token that ends documents" if token is None else f"has no token {token!r}"
        raise NamedFileError(_FOLDER, choice.path, reason, "name one with --eod-token")
    identity = json.dumps([_digest(library), eod, choice.bos])
    size = max(library.get_vocab(with_added_tokens=True).values()) + 1
    beside = {**config, **names}
    if isinstance(loaded.chat_template, str):
        beside["chat_template"] = loaded.chat_template
    return _encoder(library, size, eod, identity, beside, choice)


def _encoder(
    library: Any, size: int, eod: int, identity: str, config: Mapping[str, Any], choice: TokenizerChoice
) -> TextEncoder:
    special = {
        token.content: index for index, token in library.get_added_tokens_decoder().items() if token.special
    }
    library.encode_special_tokens = True
    plain, whole = (library.encode("a", add_special_tokens=added).ids for added in (False, True))
    at = next((at for at in range(len(whole)) if whole[at : at + len(plain)] == plain), 0)
    before, after = (whole[:at], whole[at + len(plain) :]) if choice.bos else ([], [])
    # A document ends with its own flag, --append-eod.
    after = [index for index in after if index != eod]
    names = {
        name: value if isinstance(value, str) else value.get("content", "")
        for name, value in config.items()
        if name.endswith("_token") and isinstance(value, (str, Mapping))
    }
    template = config.get("chat_template")
    return TextEncoder(
        library,
        None,
        size,
        eod,
        before,
        after,
        special,
        identity,
        template if isinstance(template, str) else "",
        names,
    )


def _touches(span: Span, content: Sequence[Span]) -> bool:
    return any(begin < span[1] and span[0] < end for begin, end in content)


def _digest(library: Any) -> str:
    return hashlib.sha256(library.to_str().encode()).hexdigest()


def _config_of(path: str | None) -> Path:
    file = Path(path or "")
    return (file if file.is_dir() else file.parent) / _CONFIG


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NamedFileError(_FOLDER, str(path), f"is no JSON ({error})", "copy it again") from error
    template = path.with_name("chat_template.jinja")
    if isinstance(found, dict) and template.is_file() and "chat_template" not in found:
        found["chat_template"] = template.read_text(encoding="utf-8")
    return found if isinstance(found, dict) else {}
