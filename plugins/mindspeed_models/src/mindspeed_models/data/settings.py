"""Settings of data preparation: what the flags of ``preprocess`` say, checked, in plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_models.data.encoding import DROP, LAST, OVERLONG, TOKENIZE, TRAIN_ON, WHOLE, Encoding
from mindspeed_models.data.handlers import Handler, InstructionHandler, handler_of
from mindspeed_models.data.templates import OWN, SEED, load_template
from mindspeed_models.data.tokenizers import TextEncoder, TokenizerChoice

PACKED_FIELDS = ("input_ids", "attention_mask", "labels")
"""Three parallel fields; "packed" in the names of their files means that, and not several samples a row."""


def packed_prefixes(prefix: str) -> tuple[str, ...]:
    """Return the prefixes of the pairs of instruction data that a prefix in ``--data-path`` stands for."""
    stem = prefix.removesuffix("_packed")
    return tuple(f"{stem}_packed_{name}_document" for name in ("input_ids", "labels", "attention_mask"))


@dataclass(frozen=True)
class Settings:
    """The form of the samples that records become.

    Attributes:
        tokenizer: the tokenizer.
        handler_name: ``--handler-name``.
        dataset_format: ``--dataset-format``.
        chat_template: ``--chat-template``; None for the seed's, or the tokenizer's with a dataset format.
        train_on: ``--train-on``.
        overlong: ``--overlong``.
        seq_length: ``--seq-length``.
        append_eod: ``--append-eod``.
        json_keys: ``--json-keys``.
        split_sentences: ``--split-sentences``.
        keep_newlines: ``--keep-newlines``.
        tokenize: ``--tokenize``.
    """

    tokenizer: TokenizerChoice
    handler_name: str = ""
    dataset_format: str | None = None
    chat_template: str | None = None
    train_on: str = LAST
    overlong: str = DROP
    seq_length: int | None = None
    append_eod: bool = False
    json_keys: tuple[str, ...] = ("text",)
    split_sentences: bool = False
    keep_newlines: bool = False
    tokenize: str = WHOLE

    def check(self) -> Handler:
        """Return the handler, after all settings were checked that need no file.

        Raises:
            ArgumentError: a flag contradicts another, or has no effect.
        """
        handler = handler_of(self.handler_name, self.dataset_format)
        if self.train_on not in TRAIN_ON or self.overlong not in OVERLONG:
            raise ArgumentError(
                "--train-on", self.train_on, "is unknown", f"use one of {', '.join(TRAIN_ON)}"
            )
        if self.tokenize not in TOKENIZE:
            raise ArgumentError(
                "--tokenize", self.tokenize, "is unknown", f"use one of {', '.join(TOKENIZE)}"
            )
        if self.seq_length is not None and self.seq_length < 2:
            raise ArgumentError("--seq-length", self.seq_length, "holds no token and its label", "use more")
        if self.keep_newlines and not self.split_sentences:
            reason = "keeps them between sentences, and documents are not split"
            raise ArgumentError("--keep-newlines", None, reason, "add --split-sentences, or drop it")
        instructions = isinstance(handler, InstructionHandler)
        if instructions and self.split_sentences:
            reason = f"{handler.name} makes samples of whole conversations"
            raise ArgumentError("--split-sentences", None, reason, "drop it")
        template_used = isinstance(handler, InstructionHandler) and handler.read is not None
        for flag, given in (
            ("--chat-template", self.chat_template is not None),
            ("--train-on", self.train_on != LAST),
            ("--tokenize", self.tokenize != WHOLE),
        ):
            if given and not template_used:
                value = getattr(self, flag.removeprefix("--").replace("-", "_"))
                reason = f"{handler.name} writes no conversation"
                remedy = "drop it, or use a handler of instructions or --dataset-format"
                raise ArgumentError(flag, value, reason, remedy)
        return handler

    def fields(self, handler: Handler) -> tuple[str, ...]:
        """Return the names of the fields that are written."""
        if isinstance(handler, InstructionHandler):
            return PACKED_FIELDS
        return handler.keys or self.json_keys

    def prefixes(self, output_prefix: str, handler: Handler) -> list[str]:
        """Return the prefixes of the pairs that are written, in the order of the fields."""
        level = "sentence" if self.split_sentences else "document"
        packed = "_packed" if isinstance(handler, InstructionHandler) else ""
        return [f"{output_prefix}{packed}_{name}_{level}" for name in self.fields(handler)]

    def encoding(self, encoder: TextEncoder) -> Encoding:
        """Return how conversations become samples.

        Raises:
            UserError: there is no such template.
        """
        default = SEED if self.dataset_format is None or not encoder.chat_template else OWN
        template = load_template(self.chat_template or default, encoder.chat_template, encoder.names)
        return Encoding(
            encoder,
            template,
            self.train_on,
            self.append_eod,
            self.seq_length,
            self.overlong,
            self.tokenize,
        )

    def facts(self, encoder: TextEncoder) -> Mapping[str, Any]:
        """Return everything on which the result depends but for the records, in plain values."""
        facts = asdict(self)
        # Where the tokenizer lies does not matter, its content does.
        facts["tokenizer"] = encoder.identity
        if self.tokenize == WHOLE:
            # Datasets that were made before there was a choice are the same.
            del facts["tokenize"]
        facts["template"] = self.encoding(encoder).template.source
        plain: dict[str, Any] = json.loads(json.dumps(facts))
        return plain


@dataclass
class Sentences:
    """Splits documents into sentences, or leaves them whole.

    Attributes:
        split: ``--split-sentences``.
        keep_newlines: ``--keep-newlines``.
    """

    split: bool
    keep_newlines: bool
    _splitter: Any = field(default=None, repr=False)

    def of(self, text: str) -> list[str]:
        """Return the sentences of a text; empty ones are left out.

        Raises:
            ArgumentError: the library or its data are not there.
        """
        if not self.split:
            return [text] if text else []
        if self._splitter is None:
            self._splitter = _punkt(self.keep_newlines)
        return [sentence for sentence in self._splitter.tokenize(text) if sentence]


def _punkt(keep_newlines: bool) -> Any:
    flag = "--split-sentences"
    try:
        punkt: Any = import_module("nltk.tokenize.punkt")
    except ImportError as error:
        raise ArgumentError(flag, None, "needs nltk, which is not installed", "pip install nltk") from error

    kept = r"""
            \S*                          # some word material
            %(SentEndChars)s             # a potential sentence ending
            \s*                          # blanks, which are kept
            (?=(?P<after_tok>
                %(NonWord)s              # either other punctuation
                |
                (?P<next_tok>\S+)        # or another word
            ))"""
    try:
        splitter = punkt.PunktTokenizer("english")
        if keep_newlines:
            # Blanks between sentences belong to the sentence before them.
            splitter._lang_vars = type(
                "KeepNewlines", (punkt.PunktLanguageVars,), {"_period_context_fmt": kept}
            )()
    except LookupError as error:
        reason = "needs nltk's data punkt_tab, which are not installed"
        remedy = "install them beside nltk (python -m nltk.downloader punkt_tab)"
        raise ArgumentError(flag, None, reason, remedy) from error
    return splitter
