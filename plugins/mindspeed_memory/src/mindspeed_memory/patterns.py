"""Patterns of module names, ``decoder.layers.{0-3}.mlp``; no torch.

A name matches part by part: ``*`` stands for any text within a part, ``{*}`` for any number, ``{0-3}`` and
``{1,4}`` for those numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*\Z")


@dataclass(frozen=True)
class Pattern:
    """A pattern of module names.

    Attributes:
        text: as it was given.
        parts: an expression for each part of a name, and the numbers that its groups allow (None for any).
    """

    text: str
    parts: tuple[tuple[re.Pattern[str], tuple[frozenset[int] | None, ...]], ...]

    @classmethod
    def of(cls, text: str) -> Pattern:
        """Read a pattern.

        Raises:
            ValueError: it is empty, or braces hold no numbers.
        """
        if not text or not all(text.split(".")):
            raise ValueError(f"{text!r} is no name of a module; write decoder.layers.{{0-3}}.mlp")
        return cls(text, tuple(map(_part, text.split("."))))

    def matches(self, name: str) -> bool:
        """Return whether a module of this qualified name is meant."""
        given = name.split(".")
        return len(given) == len(self.parts) and all(
            _fits(expression, allowed, part) for (expression, allowed), part in zip(self.parts, given)
        )


def outermost(names: Iterable[str]) -> list[str]:
    """Return the names of modules that lie in no other one of them, in their order."""
    chosen = list(names)
    return [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]


def _part(text: str) -> tuple[re.Pattern[str], tuple[frozenset[int] | None, ...]]:
    allowed: list[frozenset[int] | None] = []
    expression, end = "", 0
    for braces in _BRACES.finditer(text):
        expression += _plain(text[end : braces.start()]) + r"(\d+)"
        allowed.append(_numbers(braces[1]))
        end = braces.end()
    return re.compile(expression + _plain(text[end:]) + r"\Z"), tuple(allowed)


def _plain(text: str) -> str:
    if "{" in text or "}" in text:
        raise ValueError(f"{text!r} has a brace that does not close")
    return "[^.]*".join(map(re.escape, text.split("*")))


def _numbers(text: str) -> frozenset[int] | None:
    if text == "*":
        return None
    if not _NUMBERS.match(text):
        raise ValueError(f"{{{text}}} holds no numbers; write {{*}}, {{0-3}} or {{1,4}}")
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _fits(expression: re.Pattern[str], allowed: tuple[frozenset[int] | None, ...], part: str) -> bool:
    match = expression.match(part)
    return match is not None and all(
        numbers is None or int(found) in numbers for numbers, found in zip(allowed, match.groups())
    )
