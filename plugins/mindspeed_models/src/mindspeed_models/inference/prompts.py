"""Prompts in every form that is taken, as token ids, and the tokenizers behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.errors import UserError
from mindspeed_models.data.conversation import ASSISTANT, BadRecord, openai
from mindspeed_models.data.encoding import prompt_ids
from mindspeed_models.data.templates import OWN, load_template
from mindspeed_models.data.tokenizers import TextEncoder, TokenizerChoice, load_encoder


class Prompts:
    """Encoder of texts, ids, tensors and messages.

    Attributes:
        encoder: knows special tokens; None where the tokenizer has only plain ids.
    """

    def __init__(self, tokenizer: Any, path: str | None, kind: str | None, template: str | None) -> None:
        """Take the tokenizer of a session.

        Args:
            tokenizer: the host's.
            path: its files; None for plain ids.
            kind: ``--tokenizer-type``.
            template: name or file of a chat template; that of the tokenizer by default.
        """
        self._tokenizer, self._template = tokenizer, template
        self.encoder: TextEncoder | None = (
            load_encoder(TokenizerChoice(kind=kind, path=path)) if path else None
        )

    def of(self, given: Any, tokenizer: Any = None) -> tuple[list[list[int]], bool]:
        """Return the ids of prompts, and whether one was given alone.

        Args:
            given: text, ids, a tensor of one or two dimensions, messages, or a list of such.
            tokenizer: of texts; that of the session by default.

        Raises:
            UserError: it is something else.
        """
        given = given.tolist() if hasattr(given, "tolist") else given
        if isinstance(given, str):
            return [self.text(given, tokenizer)], True
        if not isinstance(given, Sequence) or not given:
            raise UserError("generate: a prompt is text, ids or messages, or a list of such; got nothing")
        known = isinstance(given[0], (int, str, Mapping, Sequence)) or hasattr(given[0], "tolist")
        if isinstance(given[0], bool) or not known:
            raise UserError(
                f"generate: a prompt of {type(given[0]).__name__}; give text, ids, a tensor or messages"
            )
        if isinstance(given[0], int):
            return [list(given)], True
        if isinstance(given[0], Mapping):
            return [self.messages(given)], True
        return [self.of(each, tokenizer)[0][0] for each in given], False

    def text(self, text: str, tokenizer: Any = None) -> list[int]:
        """Return the ids of a text, with those that the tokenizer puts before one."""
        if tokenizer is not None:
            encode = getattr(tokenizer, "tokenize", None) if not hasattr(tokenizer, "encode") else None
            return list((encode or tokenizer.encode)(text))
        if self.encoder is not None and self.encoder.library is not None:
            ids = self.encoder.texts([text])[0]
            return ids[: len(ids) - len(self.encoder.after)] if self.encoder.after else ids
        try:
            return list(self._tokenizer.tokenize(text))
        except ValueError as error:
            raise UserError(
                f"--prompt {text[:40]!r}: without a tokenizer a prompt is ids with blanks between them; name "
                "one with --tokenizer-model"
            ) from error

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where its next answer begins, as training encodes them.

        Raises:
            UserError: a role is unknown or out of turn, a message spells out a special token where the
                template does not show messages, or there is no template.
        """
        if self.encoder is None:
            raise UserError("messages need a tokenizer; name one with --tokenizer-model")
        chosen = self._template or OWN
        template = load_template(chosen, self.encoder.chat_template, self.encoder.names)
        try:
            # An answer is the model's: what is checked is the conversation with one.
            whole = openai({"messages": [*messages, {"role": ASSISTANT, "content": "."}]})
            return prompt_ids(self.encoder, template, whole[:-1])
        except BadRecord as error:
            raise UserError(f"messages: {error}") from error


def detokenizer(tokenizer: Any) -> Any:
    """Return the function from ids to text of a tokenizer of the host, or of transformers."""
    return getattr(tokenizer, "detokenize", None) or tokenizer.decode
