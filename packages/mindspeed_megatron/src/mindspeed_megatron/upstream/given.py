"""The given flags as a translation sees them, and the outcomes of judging one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mindspeed_core.flags.entries import Given


class Line:
    """The flags of a command line or of a dictionary, for a translation to look at."""

    def __init__(self, given: Sequence[Given], knows: Callable[[str], bool]) -> None:
        """Remember the flags, and a function that says whether somebody here declares an option."""
        self._given = [one for one in given if not one.is_off]
        self.knows = knows

    def has(self, *options: str) -> bool:
        """Return whether one of these options is given."""
        return any(one.option in options for one in self._given)

    def words(self, option: str) -> tuple[str, ...]:
        """Return the words behind the last of an option; none where it is not given."""
        return next((one.words for one in reversed(self._given) if one.option == option), ())

    def value(self, option: str, default: str = "") -> str:
        """Return the first word behind the last of an option."""
        words = self.words(option)
        return words[0] if words else default

    def number(self, option: str, default: float) -> float:
        """Return the number behind an option; the default also where it is none, which parsing reports."""
        try:
            return float(self.value(option, str(default)))
        except ValueError:
            return default


@dataclass(frozen=True)
class Translated:
    """A flag that is spelled otherwise here.

    Attributes:
        tokens: the flags to read instead, as one would type them.
        because: why they mean the same, or in what they differ.
        without: further options that leave the line with it.
    """

    tokens: tuple[str, ...]
    because: str = ""
    without: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChangesNothing:
    """A flag that is left out, and the reason why nothing is lost."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """A flag that cannot be honoured as it stands here, with the way out."""

    reason: str
    remedy: str


Outcome = Translated | ChangesNothing | Refused
Translation = Callable[[Given, Line], Outcome | None]
"""Judge a flag in its line; None leaves the flag as it is."""
