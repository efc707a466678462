"""Typed fields of values that were read from a file, with ranges and one form of message."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from mindspeed_core.errors import CheckpointError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_train.checkpoint.opened_files import ANOTHER

_ABSENT = object()


class Fields:
    """The fields of a mapping in a file; each is asked for with its type and range."""

    def __init__(self, path: Path | str, content: Any, within: str = "") -> None:
        """Take what a file holds.

        Args:
            path: the file, for messages.
            content: what should be a mapping with text as keys.
            within: the field of the file that it is, for messages.

        Raises:
            CheckpointError: it is something else.
        """
        self.path, self.within = path, within
        if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
            self.refuse("", content, "named values")
        self.content: Mapping[str, Any] = content

    def refuse(self, name: str, value: Any, expected: str) -> NoReturn:
        """Say that a field is not what it has to be.

        Raises:
            CheckpointError: always.
        """
        field = ".".join(filter(None, (self.within, name))) or "its content"
        if value is _ABSENT:
            found = "is missing"
        elif isinstance(value, (bool, int, float, str)):
            found = f"is {shown(repr(value), 60)}"
        else:
            found = f"is a {shown(type(value).__name__)}"
        raise CheckpointError(
            f"{self.path}: {shown(field)} {found}, and has to be {expected}; the file is damaged or forged; "
            f"{ANOTHER}"
        )

    def value(self, name: str, default: Any = _ABSENT) -> Any:
        """Return a field of any type; without default it has to be there."""
        found = self.content.get(name, default)
        if found is _ABSENT:
            self.refuse(name, found, "there")
        return found

    def has(self, name: str) -> bool:
        """Return whether a field is there and not None."""
        return self.content.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: Any = _ABSENT) -> int:
        """Return a field that is an integer, and no truth value, within bounds."""
        found = self.value(name, default)
        if type(found) is not int or not low <= found <= high:
            self.refuse(name, found, f"an integer from {low} to {high}")
        return found

    def text(self, name: str, default: Any = _ABSENT) -> str:
        """Return a field that is text."""
        found = self.value(name, default)
        if not isinstance(found, str):
            self.refuse(name, found, "text")
        return found

    def choice(self, name: str, choices: Collection[str], default: Any = _ABSENT) -> str:
        """Return a field that is one of some texts."""
        found = self.value(name, default)
        if not isinstance(found, str) or found not in choices:
            self.refuse(name, found, f"one of {', '.join(sorted(choices))}")
        return found

    def truth(self, name: str, default: Any = _ABSENT) -> bool:
        """Return a field that is true or false."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            self.refuse(name, found, "true or false")
        return found

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """Return a field that is a number, and no truth value, and not NaN."""
        found = self.value(name)
        if type(found) not in (int, float) or not low <= found <= high:
            self.refuse(name, found, f"a number from {low} to {high}")
        return float(found)

    def items(self, name: str, kind: type, default: Any = _ABSENT) -> list[Any]:
        """Return a field that is a list of values of one type."""
        found = self.value(name, default)
        if not isinstance(found, (list, tuple)) or not all(type(each) is kind for each in found):
            self.refuse(name, found, f"a list of {kind.__name__}")
        return list(found)

    def mapping(self, name: str, default: Any = _ABSENT) -> Mapping[str, Any]:
        """Return a field that is a mapping with text as keys."""
        return self.child(name, default).content

    def child(self, name: str, default: Any = _ABSENT) -> Fields:
        """Return the fields of a field."""
        return Fields(self.path, self.value(name, default), ".".join(filter(None, (self.within, name))))

    def children(self, name: str) -> Iterator[tuple[str, Fields]]:
        """Yield name and fields of each entry of a field."""
        inner = self.child(name)
        for key in inner.content:
            yield key, inner.child(key)

    def numbers(
        self, values: Any, *, high: int, low: int = 0, count: int | None = None, most: int | None = None
    ) -> list[int]:
        """Return a list of integers within bounds, as many as asked for."""
        if not isinstance(values, (list, tuple)) or not all(
            type(each) is int and low <= each <= high for each in values
        ):
            self.refuse("", values, f"a list of integers from {low} to {high}")
        if (count is not None and len(values) != count) or (most is not None and len(values) > most):
            self.refuse("", values, f"{most if count is None else count} integers")
        return list(values)
