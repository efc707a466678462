"""Errors that reach a user as one message instead of a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right; the message says what and how. Programs print it and exit with 1."""


class ArgumentError(UserError):
    """A flag has a value that cannot work."""

    def __init__(self, flag: str, value: object, reason: str, remedy: str = "") -> None:
        """Compose the message from the flag, its value, the reason and the way out."""
        shown = repr(value) if isinstance(value, str) else str(value)
        text = f"{flag} {shown[:200]}: {reason}" if value is not None else f"{flag}: {reason}"
        super().__init__(text + (f"; {remedy}" if remedy else ""))
        self.flag = flag
        self.value = value
        self.reason = reason
        self.remedy = remedy


class CheckpointError(UserError):
    """A checkpoint cannot be written or read; the message names the file."""


class DataError(UserError):
    """A dataset, tokenizer or text file cannot be used; the message names the file."""


class PatchError(RuntimeError):
    """A patch cannot be applied or taken back; the message names target and owner."""


class SessionError(RuntimeError):
    """A session is used in a way that cannot work (opened twice, used after close)."""
