"""Errors that reach a user as one message instead of a traceback."""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Mistake that the user can mend; the message says how. Programs print it and exit with `exit_status`."""

    exit_status = 1


class UsageError(UserError):
    """Command line with words that mean nothing here."""

    exit_status = 2


class ArgumentError(UserError):
    """Flag with a value that cannot work.

    Attributes:
        flag: the option string.
        value: its value; None for a switch, and for a flag that is missing.
        reason: why it cannot work.
        remedy: the way out.
        wrong: value and reason in one sentence.
    """

    def __init__(self, flag: str, value: object, reason: str, remedy: str = "") -> None:
        """Compose the message from the flag, its value, the reason and the way out."""
        shown = repr(value) if isinstance(value, str) else str(value)
        self.flag = flag
        self.value = value
        self.reason = reason
        self.remedy = remedy
        self.wrong = reason if value is None else f"{shown[:200]}: {reason}"
        text = f"{flag}: {reason}" if value is None else f"{flag} {self.wrong}"
        super().__init__(text + (f"; {remedy}" if remedy else ""))


class LostPeerError(UserError):
    """Rank that ended while this one waited for it; that rank's own message comes first."""


class CheckpointError(UserError):
    """Checkpoint that cannot be written or read; the message names the file."""


class DataError(UserError):
    """Dataset, tokenizer or text file that cannot be used; the message names the file."""


class NamedFileError(ArgumentError, DataError):
    """File of data that cannot be used, with the flag that names it."""


class DeclarationError(ValueError):
    """Wrong declaration of a feature, flag, slot or patch; the message says how to mend it."""


class RefusedValue(ValueError):
    """Value that the type of a flag can read and that the flag does not accept."""


class PatchError(RuntimeError):
    """Patch that cannot be applied or reverted; the message names target and owner."""


class SessionError(RuntimeError):
    """Session used in a way that cannot work (opened twice, used after close)."""


def annotate(error: BaseException, note: str) -> None:
    """Add a line below the message of an error, also with Python 3.10."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def guess(name: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` where a known name is spelled like ``name``, otherwise nothing."""
    from difflib import get_close_matches

    close = get_close_matches(name, sorted(candidates), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
