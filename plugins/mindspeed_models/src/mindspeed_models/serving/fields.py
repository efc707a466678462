"""Fields of a request's body, read one by one: each wrong value is one sentence with the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mindspeed_core.errors import guess
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_models.serving.settings import Refused


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object of a body.

    Raises:
        Refused: it is no JSON, or no object.
    """

    def no_number(text: str) -> float:
        raise Refused(400, f"the body holds {text}, which is no JSON")

    try:
        found = json.loads(body.decode("utf-8"), parse_constant=no_number)
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is no UTF-8 (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        reason = shown(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise Refused(400, f"the body is no JSON: {reason}") from error
    if b"\\u" in body:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused(400, "the body holds half a character (a lone surrogate)") from error
    if not isinstance(found, dict):
        raise Refused(400, f"the body is a JSON {type(found).__name__}, an object is asked for")
    return found


class Fields:
    """The fields of a body; ``finish`` refuses those that nobody has read."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        """Begin with none of them read; null is like absent."""
        self._body = {name: value for name, value in body.items() if value is not None}
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """Return a value of any type; None where it is absent."""
        self._read.add(name)
        return self._body.get(name)

    def switch(self, name: str) -> bool:
        """Return a Boolean; False where it is absent."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return bool(value)

    def whole(self, name: str, default: int | None, least: int, most: int) -> int | None:
        """Return a whole number from ``least`` to ``most``."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number from ``least`` to ``most``."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(name, value, f"a number from {least:g} to {most:g}")
        try:
            read = float(value)
        except OverflowError:
            read = math.inf
        if not least <= read <= most:
            raise _wrong(name, value, f"a number from {least:g} to {most:g}")
        return read

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """Return one text or a list of texts; none where it is absent."""
        value = self.raw(name)
        found = [value] if isinstance(value, str) else value
        if found is None:
            return ()
        if not isinstance(found, Sequence) or len(found) > most or not all(_text(each) for each in found):
            raise _wrong(name, value, f"a text, or a list of at most {most} texts, none of them empty")
        return tuple(found)

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        """Refuse a field that asks for what is not done here."""
        value = self.raw(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            raise Refused(400, f"{name} {shown(json.dumps(value), 80)}: {why}; leave it out", param=name)

    def ignore(self, *names: str) -> None:
        """Take fields that change no answer."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuse fields that nobody has read.

        Raises:
            Refused: there is one; the nearest known name is said.
        """
        for name in self._body:
            if name not in self._read:
                raise Refused(
                    400,
                    f"{shown(name, 60)}: there is no such field{guess(name, self._read)}",
                    param=name[:60],
                )


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _wrong(name: str, value: Any, wanted: str) -> Refused:
    return Refused(400, f"{name} is {shown(json.dumps(value), 80)}, not {wanted}", param=name)
