"""Ids of prompts: plain texts, and conversations that a chat template writes.

What users say never becomes a special token: only what the template itself writes does, as in training
(`mindspeed_models.data.encoding`). Every prompt begins as the tokenizer begins a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import ArgumentError, UserError
from mindspeed_models.data.conversation import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    BadRecord,
    Message,
)
from mindspeed_models.data.encoding import prompt_ids
from mindspeed_models.data.templates import OWN, Template, load_template, template_names
from mindspeed_models.data.tokenizers import TextEncoder, encoder_around
from mindspeed_train.interface import NullTokenizer

if TYPE_CHECKING:
    from mindspeed_models.inference.loaded import LoadedModel

_FLAG = "--chat-template"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)


@dataclass(frozen=True)
class Prompts:
    """The way from text to ids.

    Attributes:
        encoder: the tokenizer.
        template: writes conversations; None where there is none.
    """

    encoder: TextEncoder
    template: Template | None

    def text(self, text: str) -> list[int]:
        """Return the ids of a plain text; special tokens that it spells are text.

        Raises:
            UserError: there is no tokenizer, and the text is no list of ids.
        """
        encoder = self.encoder
        if isinstance(encoder.plain, NullTokenizer):
            try:
                return encoder.plain.tokenize(text)
            except ValueError as error:
                raise UserError(
                    f"prompt {text[:40]!r}: without a tokenizer a prompt is ids with blanks between them; "
                    "start with --tokenizer-model"
                ) from error
        if encoder.library is None:
            return list(encoder.plain.tokenize(text))
        encoder.library.encode_special_tokens = True
        return [*encoder.before, *encoder.library.encode(text, add_special_tokens=False).ids]

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the next answer begins.

        Raises:
            UserError: there is no tokenizer or no template, or it refuses the messages.
        """
        if isinstance(self.encoder.plain, NullTokenizer):
            raise UserError("messages need a tokenizer; start with --tokenizer-model")
        if self.template is None:
            names = ", ".join(template_names())
            raise ArgumentError(
                _FLAG, None, "the tokenizer has no template of its own", f"name one of {names}"
            )
        try:
            checked_dialogue(messages)
            return prompt_ids(self.encoder, self.template, messages)
        except BadRecord as error:
            raise UserError(f"messages: {error}") from error

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of ids; empty where one of them is no token."""
        if not all(0 <= index < self.encoder.vocab_size for index in ids):
            return ""
        library = self.encoder.library
        if library is None:
            return str(self.encoder.plain.detokenize(ids))
        return str(library.decode(list(ids), skip_special_tokens=False))


def load_prompts(model: LoadedModel, folder: str | Path | None, choice: str | None) -> Prompts:
    """Return the prompts of a loaded model.

    Args:
        model: whose tokenizer and template are used.
        folder: where the tokenizer's own files may be, for the names of its special tokens.
        choice: ``--chat-template``; None takes the tokenizer's own, where it has one.

    Raises:
        UserError: the model has no tokenizer, or there is no such template.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise UserError("the model has no tokenizer, and text is asked for; name one with --tokenizer-model")
    encoder = encoder_around(tokenizer, folder)
    of_tokenizer = model.chat_template or encoder.chat_template
    if choice is None and not of_tokenizer:
        return Prompts(encoder, None)
    return Prompts(encoder, load_template(choice or OWN, of_tokenizer, encoder.names))


def checked_dialogue(messages: Sequence[Message]) -> None:
    """Check that a conversation can be continued by an answer.

    Raises:
        BadRecord: it is empty, or its last message is the assistant's.
    """
    if not messages:
        raise BadRecord("there is none")
    if any(message.role == SYSTEM for message in messages[1:]):
        raise BadRecord("a system message is not the first one")
    if all(message.role == SYSTEM for message in messages):
        raise BadRecord("there is no question after the system message")
    if messages[-1].role == ASSISTANT:
        raise BadRecord("the last one is the assistant's, and an answer is asked for")
