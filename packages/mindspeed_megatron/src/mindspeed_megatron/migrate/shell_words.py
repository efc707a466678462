"""Words of a shell script, with what the shell would replace in them left apart.

The part of the shell's grammar that ordinary launch scripts use: quotes, continued lines, comments,
variables, arrays, and operators between commands. Whatever would have to be run stays as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LITERAL, VARIABLE, COMMAND, ARITHMETIC, PLACEHOLDER = (
    "literal",
    "variable",
    "command",
    "arithmetic",
    "placeholder",
)
_OPERATORS = ("&&", "||", ";;", ">>", "2>&1", "&>", "<<", ";", "|", "&", "(", ")", "<", ">")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?]")
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w ./-]*>")
_END = " \t\n;|&()<>"


@dataclass(frozen=True)
class Part:
    """A part of a word.

    Attributes:
        kind: one of the kinds of this module.
        text: the literal text, the variable's expression without its braces, or the whole text.
        quoted: it stands in quotes, so that blanks in it separate no words.
    """

    kind: str
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Token:
    """A word, or an operator between commands; a line's end is the operator ``"\\n"``."""

    line: int
    parts: tuple[Part, ...] = ()
    operator: str = ""

    @property
    def plain(self) -> str:
        """Return the text of a word without replacements; empty for others."""
        literal = all(part.kind == LITERAL for part in self.parts)
        return "".join(part.text for part in self.parts) if literal else ""


class ShellText:
    """A script that is read from its beginning."""

    def __init__(self, text: str) -> None:
        """Read ``text``; Windows line ends are those of the shell."""
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._line = 1

    def tokens(self) -> Iterator[Token]:
        """Yield words and operators."""
        text = self._text
        while self._at < len(text):
            here = text[self._at]
            if text.startswith("\\\n", self._at):
                self._advance(2)
            elif here == "\n":
                yield Token(self._line, operator="\n")
                self._advance(1)
            elif here in " \t":
                self._advance(1)
            elif here == "#":
                end = text.find("\n", self._at)
                self._advance((end if end >= 0 else len(text)) - self._at)
            elif _PLACEHOLDER.match(text, self._at):
                yield self._word()
            else:
                operator = next((o for o in _OPERATORS if text.startswith(o, self._at)), "")
                if operator:
                    yield Token(self._line, operator=operator)
                    self._advance(len(operator))
                else:
                    yield self._word()

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _word(self) -> Token:
        line, parts = self._line, []
        text = self._text
        while self._at < len(text):
            here = text[self._at]
            if text.startswith("\\\n", self._at):
                self._advance(2)
            elif here == "\\":
                parts.append(Part(LITERAL, text[self._at + 1 : self._at + 2], True))
                self._advance(2)
            elif here == "'":
                end = self._closing("'")
                parts.append(Part(LITERAL, text[self._at + 1 : end], True))
                self._advance(end + 1 - self._at)
            elif here == '"':
                parts += self._double_quoted()
            elif here in "$`":
                parts.append(self._replaced(False))
            elif match := _PLACEHOLDER.match(text, self._at):
                parts.append(Part(PLACEHOLDER, match.group()))
                self._advance(len(match.group()))
            elif here in _END:
                break
            else:
                parts.append(Part(LITERAL, here))
                self._advance(1)
        return Token(line, _joined(parts))

    def _closing(self, quote: str) -> int:
        end = self._text.find(quote, self._at + 1)
        return len(self._text) if end < 0 else end

    def _double_quoted(self) -> list[Part]:
        parts: list[Part] = [Part(LITERAL, "", True)]
        self._advance(1)
        text = self._text
        while self._at < len(text) and text[self._at] != '"':
            if text.startswith("\\\n", self._at):
                self._advance(2)
            elif text[self._at] == "\\" and text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`"):
                parts.append(Part(LITERAL, text[self._at + 1], True))
                self._advance(2)
            elif text[self._at] in "$`":
                parts.append(self._replaced(True))
            else:
                parts.append(Part(LITERAL, text[self._at], True))
                self._advance(1)
        self._advance(1)
        return parts

    def _replaced(self, quoted: bool) -> Part:
        """Read what the shell would replace: a variable, the output of a command, a sum."""
        text, start = self._text, self._at
        if text[start] == "`":
            end = self._closing("`") + 1
            self._advance(end - start)
            return Part(COMMAND, text[start:end], quoted)
        if text.startswith("$((", start) or text.startswith("$(", start):
            end = self._balanced("(", ")")
            whole = text[start:end]
            self._advance(end - start)
            if whole.startswith("$((") and whole.endswith("))"):
                return Part(ARITHMETIC, whole[3:-2], quoted)
            return Part(COMMAND, whole, quoted)
        if text.startswith("${", start):
            end = self._balanced("{", "}")
            self._advance(end - start)
            return Part(VARIABLE, text[start + 2 : end - 1], quoted)
        match = _NAME.match(text, start + 1)
        if match is None:
            self._advance(1)
            return Part(LITERAL, "$", quoted)
        self._advance(1 + len(match.group()))
        return Part(VARIABLE, match.group(), quoted)

    def _balanced(self, opening: str, closing: str) -> int:
        """Return the place behind the bracket that closes the first one."""
        depth, at = 0, self._at
        while at < len(self._text):
            depth += {opening: 1, closing: -1}.get(self._text[at], 0)
            at += 1
            if not depth and self._text[at - 1] == closing:
                break
        return at


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Join literal parts that stand beside each other in the same quotes."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if last is not None and last.kind == part.kind == LITERAL and last.quoted == part.quoted:
            found[-1] = Part(LITERAL, last.text + part.text, part.quoted)
        else:
            found.append(part)
    return tuple(found)
