"""Notes on flags of a launch script that change nothing here, or are read as others."""

from __future__ import annotations

from dataclasses import dataclass

LEAVE_OUT = "leave it out"


@dataclass(frozen=True)
class FlagNote:
    """A note on one given flag.

    Attributes:
        flag: the flag as it was given.
        reason: why it changes nothing, or why it means the same.
        read_as: what is read instead; empty where the flag changes nothing.
    """

    flag: str
    reason: str = ""
    read_as: str = ""

    def __str__(self) -> str:
        """Return one line."""
        if not self.read_as:
            return f"{self.flag} changes nothing here: {self.reason}"
        return f"{self.flag} is read as {self.read_as}" + (f": {self.reason}" if self.reason else "")
