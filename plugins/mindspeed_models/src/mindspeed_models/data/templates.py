"""Chat templates: the text of a conversation, and which parts of it are contents and answers.

A template is Jinja, as tokenizers bring it, and runs in a sandbox; the seed's own, ``ascendspeed-alpaca``, is
a plain function. Answers are found by rendering prefixes of the conversation, so that any template works
that writes a conversation like a prefix of the longer one. Templates that write earlier turns differently
(without thoughts, for instance) give one sample a turn.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_models.data.conversation import ASSISTANT, SYSTEM, USER, BadRecord, Conversation, Message

SEED = "ascendspeed-alpaca"
OWN = "tokenizer"
_FLAG = "--chat-template"
_SEED_SYSTEM = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request. "
    "Please note that you need to think through your response logically and step by step."
)
_MARKERS = {USER: "### Instruction:", ASSISTANT: "### Response:"}

Render = Callable[[Sequence[Message], bool], str]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation.

    Attributes:
        text: of all messages.
        answers: characters of the assistant's turns, in order, what ends a turn included.
        content: characters of what messages say, in order; None where the template writes them otherwise.
    """

    text: str
    answers: tuple[Span, ...]
    content: tuple[Span, ...] | None


@dataclass(frozen=True)
class Template:
    """A way to write conversations.

    Attributes:
        name: for messages.
        render: writes messages, and the beginning of an answer where the second argument is True.
        source: its text, on which prepared data depend.
    """

    name: str
    render: Render = field(compare=False)
    source: str

    def samples(self, messages: Conversation) -> Iterator[Rendered]:
        """Yield the conversation as one text, or as one text a turn where earlier turns are written anew.

        Raises:
            BadRecord: the template refuses the messages, or hides what they say.
        """
        ends = [at + 1 for at, message in enumerate(messages) if message.role == ASSISTANT]
        texts = [self._written(messages[:end]) for end in ends]
        if all(texts[-1].startswith(text) for text in texts):
            yield self._rendered(messages, texts[-1], ends, texts)
            return
        for end, text in zip(ends, texts):
            yield self._rendered(messages[:end], text, [end], [text])

    def prompt(self, messages: Sequence[Message]) -> Rendered:
        """Write a conversation up to where its next answer begins.

        Raises:
            BadRecord: the template refuses the messages.
        """
        text = self._written(messages, answer=True)
        return Rendered(text, (), self._contents(messages, text, answer=True))

    def _rendered(
        self, messages: Conversation, text: str, ends: Sequence[int], texts: Sequence[str]
    ) -> Rendered:
        answers = []
        for end, until in zip(ends, texts):
            prompt = self._written(messages[: end - 1], answer=True)
            if not until.startswith(prompt):
                raise BadRecord(f"the template {self.name} writes a prompt otherwise than before an answer")
            answers.append((len(prompt), len(until)))
        return Rendered(text, tuple(answers), self._contents(messages, text))

    def _contents(
        self, messages: Sequence[Message], text: str, *, answer: bool = False
    ) -> tuple[Span, ...] | None:
        """Return where contents are, found by marks in their places; None where they are not found."""
        marks = [f"\ue000{number}\ue001" for number in range(len(messages))]
        marked = self._written([Message(m.role, mark) for m, mark in zip(messages, marks)], answer=answer)
        spans: list[Span] = []
        at = before = 0
        for mark, message in zip(marks, messages):
            found = marked.find(mark, before)
            if found < 0:
                return None
            at += found - before
            forms = (
                message.content,
                message.content.strip(),
                message.content.lstrip(),
                message.content.rstrip(),
            )
            form = next((form for form in forms if text.startswith(form, at)), None)
            if form is None:
                return None
            spans.append((at, at + len(form)))
            at, before = at + len(form), found + len(mark)
        return tuple(spans) if text[at:] == marked[before:] else None

    def _written(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        return self.render(messages, answer)


def seed_alpaca(messages: Sequence[Message], answer: bool) -> str:
    """Write a conversation as AscendSpeed's prompter does: a sentence, then marked messages."""
    system = next((m.content for m in messages if m.role == SYSTEM), _SEED_SYSTEM)
    text = f"\n{system}\n"
    for message in messages:
        if message.role in _MARKERS:
            text += f"{_MARKERS[message.role]}\n{message.content}\n"
    return f"{text}{_MARKERS[ASSISTANT]}\n" if answer else text


def load_template(choice: str, of_tokenizer: str, names: Mapping[str, str]) -> Template:
    """Load a template by name, from a file, or the one that came with the tokenizer.

    Args:
        choice: ``--chat-template``: a name, a file, or ``tokenizer``.
        of_tokenizer: the tokenizer's own, empty for none.
        names: spellings of special tokens that templates use.

    Raises:
        UserError: there is no such template, or it is not valid.
    """
    if choice == SEED:
        return Template(SEED, seed_alpaca, SEED)
    if choice == OWN:
        if not of_tokenizer:
            reason = "the tokenizer has no template of its own"
            raise ArgumentError(
                _FLAG, choice, reason, f"name one of {', '.join(template_names())}, or a file"
            )
        source = of_tokenizer
    elif choice in template_names():
        source = _folder().joinpath(f"{choice}.jinja").read_text(encoding="utf-8")
    elif Path(choice).is_file():
        try:
            source = Path(choice).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise NamedFileError(_FLAG, choice, f"cannot be read ({error})", "write it in UTF-8") from error
    else:
        near = difflib.get_close_matches(choice, template_names(), n=2)
        remedy = f"did you mean {' or '.join(near)}" if near else f"use one of {', '.join(template_names())}"
        raise ArgumentError(_FLAG, choice, "is neither a template nor a file", remedy)
    return Template(choice, _jinja(choice, source, names), source)


def template_names() -> list[str]:
    """Return the names of the templates that come with the package."""
    found = [
        entry.name.removesuffix(".jinja") for entry in _folder().iterdir() if entry.name.endswith(".jinja")
    ]
    return sorted([*found, SEED])


def _folder() -> Any:
    return resources.files("mindspeed_models.data").joinpath("chat_templates")


def _jinja(name: str, source: str, names: Mapping[str, str]) -> Render:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise BadRecord(f"the template {name} says: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    try:
        template = environment.from_string(source)
    except TemplateError as error:
        reason = f"is no valid template ({first_line(error)})"
        raise NamedFileError(_FLAG, name, reason, "correct it") from error

    def render(messages: Sequence[Message], answer: bool) -> str:
        told = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return template.render(messages=told, add_generation_prompt=answer, **names)
        except BadRecord:
            raise
        except Exception as error:
            # What a template does with a message is its author's.
            raise BadRecord(f"the template {name} fails: {first_line(error)}") from error

    return render
