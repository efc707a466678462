"""Conversations: messages by role, and the record formats in which they are stored.

Three formats are common (``--dataset-format``): *alpaca* (``instruction``, ``input``, ``output``, with
``system`` and ``history``), *sharegpt* (``conversations`` of ``from`` and ``value``) and *openai*
(``messages`` of ``role`` and ``content``). A record that is none of them is refused with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
_SHAREGPT = {
    "system": SYSTEM,
    "human": USER,
    "user": USER,
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "bot": ASSISTANT,
    "chatgpt": ASSISTANT,
    "function_call": ASSISTANT,
    "observation": TOOL,
    "tool": TOOL,
}
_OPENAI = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}


class BadRecord(ValueError):
    """Reason why a record is left out."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        content: its text.
    """

    role: str
    content: str


Conversation = tuple[Message, ...]
Reader = Callable[[Mapping[str, Any]], Conversation]


def text_of(record: Mapping[str, Any], key: str, *, optional: bool = False) -> str:
    """Return a text of a record.

    Raises:
        BadRecord: it is missing, or no text.
    """
    value = record.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        found = ", ".join(map(str, record)) or "nothing"
        lacking = "is missing" if value is None else f"is {type(value).__name__}, not text"
        raise BadRecord(f"{key!r} {lacking} (the record has {found})")
    return value


def alpaca(record: Mapping[str, Any]) -> Conversation:
    """Read ``instruction``, ``input`` and ``output``, with ``system`` and ``history`` where they are."""
    messages: list[Message] = []
    system = text_of(record, "system", optional=True)
    if system:
        messages.append(Message(SYSTEM, system))
    for turn in record.get("history") or ():
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise BadRecord("'history' is no list of pairs of question and answer")
        if not all(isinstance(part, str) for part in turn):
            raise BadRecord("'history' holds something else than text")
        messages += [Message(USER, turn[0]), Message(ASSISTANT, turn[1])]
    question = text_of(record, "instruction")
    more = text_of(record, "input", optional=True)
    messages.append(Message(USER, f"{question}\n{more}" if more else question))
    messages.append(Message(ASSISTANT, text_of(record, "output")))
    return checked(messages)


def sharegpt(record: Mapping[str, Any]) -> Conversation:
    """Read ``conversations`` of ``from`` and ``value``."""
    system = text_of(record, "system", optional=True)
    messages = _messages(record, "conversations", "from", "value", _SHAREGPT)
    return checked([Message(SYSTEM, system), *messages] if system else messages)


def openai(record: Mapping[str, Any]) -> Conversation:
    """Read ``messages`` of ``role`` and ``content``."""
    return checked(_messages(record, "messages", "role", "content", _OPENAI))


def openai_messages(record: Mapping[str, Any]) -> list[Message]:
    """Read ``messages`` of ``role`` and ``content`` that still wait for an answer.

    Raises:
        BadRecord: a message has another form, or a role that is not known.
    """
    return _messages(record, "messages", "role", "content", _OPENAI)


FORMATS: Mapping[str, Reader] = {"alpaca": alpaca, "sharegpt": sharegpt, "openai": openai}


def _messages(
    record: Mapping[str, Any], key: str, role: str, content: str, roles: Mapping[str, str]
) -> list[Message]:
    turns = record.get(key)
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise BadRecord(f"{key!r} is no list of messages")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, Mapping):
            raise BadRecord(f"message {number} is no object")
        named = turn.get(role)
        if not isinstance(named, str) or named not in roles:
            raise BadRecord(f"message {number} has the {role} {named!r}, not one of {', '.join(roles)}")
        value = turn.get(content)
        if isinstance(value, Sequence) and not isinstance(value, str):
            # Parts of a message; only text can be trained here.
            value = _joined(value, number)
        if not isinstance(value, str):
            raise BadRecord(f"message {number} has no text under {content!r}")
        messages.append(Message(roles[named], value))
    return messages


def _joined(parts: Sequence[Any], number: int) -> str:
    texts = []
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise BadRecord(f"message {number} holds something else than text")
        texts.append(part["text"])
    return "".join(texts)


def checked(messages: Sequence[Message]) -> Conversation:
    """Return a conversation in which the sides take turns and every answer says something.

    Raises:
        BadRecord: the order of roles is wrong, or an answer is empty.
    """
    turns = [message for message in messages if message.role != SYSTEM]
    if any(message.role == SYSTEM for message in messages[1:]):
        raise BadRecord("a system message is not the first one")
    if not turns or turns[0].role != USER:
        raise BadRecord("the first message is not the user's")
    for before, now in pairwise(turns):
        allowed = (ASSISTANT,) if before.role != ASSISTANT else (USER, TOOL)
        if now.role not in allowed and not (before.role == TOOL and now.role == TOOL):
            raise BadRecord(f"a message of {now.role} follows one of {before.role}")
    if turns[-1].role != ASSISTANT:
        raise BadRecord("the last message is not the assistant's")
    if any(message.role == ASSISTANT and not message.content.strip() for message in turns):
        raise BadRecord("an answer is empty")
    return tuple(messages)
