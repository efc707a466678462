"""Handlers: what a record of a corpus becomes, by AscendSpeed's names of ``--handler-name``.

Two kinds: a handler of text names the fields of a dataset and the sentences of a record in each; a handler of
instructions reads a conversation, or makes samples by a rule of its own. The formats of ``--dataset-format``
are handlers of instructions too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_models.data.conversation import (
    ASSISTANT,
    FORMATS,
    USER,
    BadRecord,
    Conversation,
    Message,
    Reader,
    checked,
    text_of,
)
from mindspeed_models.data.encoding import IGNORED, Sample
from mindspeed_models.data.tokenizers import TextEncoder

PRETRAIN = "GeneralPretrainHandler"
TEXT = "text"
_BAICHUAN_USER, _BAICHUAN_ASSISTANT = 195, 196


@dataclass(frozen=True)
class TextHandler:
    """Turns records into text that is trained as it is.

    Attributes:
        name: of the handler.
        texts: the text of a record under each key.
        keys: names of the fields; empty for those of ``--json-keys``.
    """

    name: str
    texts: Callable[[Mapping[str, Any], Sequence[str]], list[str]]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class InstructionHandler:
    """Turns records into samples of instruction data.

    Attributes:
        name: of the handler.
        read: conversations of a record, each a sample; None where ``encode`` makes the samples.
        encode: samples of a record by a rule of its own, without a template.
    """

    name: str
    read: Callable[[Mapping[str, Any]], Iterator[Conversation]] | None = None
    encode: Callable[[Mapping[str, Any], TextEncoder], Iterator[Sample]] | None = None


Handler = TextHandler | InstructionHandler


def _columns(record: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    return [text_of(record, key) for key in keys]


def _alpaca_text(record: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    more = text_of(record, "input", optional=True)
    question = text_of(record, "instruction")
    # Upstream writes the word None for an empty input.
    inputs = f" Input:\n{more}" if more else ""
    return [
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
        "helpful, detailed, and polite answers to the user's questions.USER: Below is an instruction that "
        "describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{question}\n\n###{inputs}\n\n### Response: ASSISTANT: {text_of(record, 'output')}"
    ]


def _stack_overflow(record: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    title, question, answer = (text_of(record, key) for key in ("title", "question_body", "answer_body"))
    return [f"In python, {title}\n### Question:\n{question}\n### Response:\n{answer}\n"]


def _each(read: Reader) -> Callable[[Mapping[str, Any]], Iterator[Conversation]]:
    def one(record: Mapping[str, Any]) -> Iterator[Conversation]:
        yield read(record)

    return one


def _general(record: Mapping[str, Any]) -> Iterator[Conversation]:
    """Yield question and answer; the question is followed by its input, which may be empty, on a new line."""
    question = f"{text_of(record, 'instruction')}\n{text_of(record, 'input', optional=True)}"
    yield checked([Message(USER, question), Message(ASSISTANT, text_of(record, "output"))])


def _belle(record: Mapping[str, Any]) -> Iterator[Conversation]:
    """Yield the history of ``Human:`` and ``Assistant:`` in ``instruction``, answered by ``output``."""
    messages: list[Message] = []
    for turn in text_of(record, "instruction").split("Human:"):
        if not turn:
            continue
        said, *answers = turn.split("Assistant:")
        if not answers:
            raise BadRecord("'instruction' holds something of Human: that Assistant: does not follow")
        messages += [Message(USER, said.strip()), Message(ASSISTANT, answers[0].strip())]
    if not messages or messages[-1].content:
        raise BadRecord("'instruction' does not end in an open Assistant:")
    messages[-1] = Message(ASSISTANT, text_of(record, "output").strip())
    yield checked(messages)


def _moss_turns(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    chat = record.get("chat")
    if not isinstance(chat, Mapping) or not chat:
        raise BadRecord("'chat' is no object of turns")
    turns = []
    for name, turn in chat.items():
        if not turn:
            continue
        if not isinstance(turn, Mapping):
            raise BadRecord(f"{name!r} is no object")
        user = text_of(turn, "Human").replace("<eoh>", "").replace("<|Human|>: ", "").strip()
        answer = text_of(turn, "MOSS").replace("<|MOSS|>:", "").replace("<eom>", "").strip()
        if not answer:
            raise BadRecord(f"the answer of {name!r} is empty")
        turns.append((user, answer))
    if not turns:
        raise BadRecord("'chat' has no turn")
    return turns


def _moss_prefixes(record: Mapping[str, Any]) -> Iterator[Conversation]:
    """Yield every prefix of the conversation, each answered by its last turn."""
    messages: list[Message] = []
    for user, answer in _moss_turns(record):
        messages += [Message(USER, user), Message(ASSISTANT, answer)]
        yield checked(messages)


def _moss_at_once(record: Mapping[str, Any], encoder: TextEncoder) -> Iterator[Sample]:
    """Yield the whole conversation, with the markers of Baichuan and labels at the tokens they belong to.

    The model learns to end before the next question: the label of a user's marker is the end of a document.
    """
    ids: list[int] = []
    labels: list[int] = []
    for user, answer in _moss_turns(record):
        asked, answered = encoder.texts([user, answer])
        ids += [_BAICHUAN_USER, *asked, _BAICHUAN_ASSISTANT, *answered]
        labels += [encoder.eod, *([IGNORED] * (len(asked) + 1)), *answered]
    yield Sample([*ids, encoder.eod], [*labels, encoder.eod])


def _leetcode(record: Mapping[str, Any]) -> Iterator[Conversation]:
    question = text_of(record, "code_with_problem").split("```", maxsplit=1)[0].strip()
    answer = f"{text_of(record, 'code_only')}\n{text_of(record, 'explanation_only')}"
    yield checked([Message(USER, question), Message(ASSISTANT, answer)])


HANDLERS: Mapping[str, Handler] = {
    handler.name: handler
    for handler in (
        TextHandler(PRETRAIN, _columns),
        TextHandler("AlpacaPretrainHandler", _alpaca_text, (TEXT,)),
        TextHandler("StackOverflowPythonPretrainHandler", _stack_overflow, (TEXT,)),
        InstructionHandler("GeneralInstructionHandler", _general),
        InstructionHandler("BelleMultiTurnInstructionHandler", _belle),
        InstructionHandler("MOSSInstructionHandler", _moss_prefixes),
        InstructionHandler("MOSSMultiTurnHandler", encode=_moss_at_once),
        InstructionHandler("LeetcodePythonInstructionHandler", _leetcode),
    )
}


def handler_of(name: str, dataset_format: str | None) -> Handler:
    """Return the handler that the flags name.

    Args:
        name: ``--handler-name``; empty for the general handler of text.
        dataset_format: ``--dataset-format``, which takes its place.

    Raises:
        ArgumentError: there is no such handler, or both are given.
    """
    if dataset_format is not None:
        if name:
            reason = f"--dataset-format {dataset_format} says what a record becomes"
            raise ArgumentError("--handler-name", name, reason, "drop one of the two")
        return InstructionHandler(f"--dataset-format {dataset_format}", _each(FORMATS[dataset_format]))
    if name and name not in HANDLERS:
        near = difflib.get_close_matches(name, HANDLERS, n=2)
        remedy = f"did you mean {' or '.join(near)}" if near else f"use one of {', '.join(HANDLERS)}"
        raise ArgumentError("--handler-name", name, "is unknown", remedy)
    return HANDLERS[name or PRETRAIN]


__all__ = ["HANDLERS", "PRETRAIN", "Handler", "InstructionHandler", "TextHandler", "handler_of"]
