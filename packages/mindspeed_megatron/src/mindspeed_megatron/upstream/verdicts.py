"""Verdicts on flags that nobody declares, and the search for the one of an option."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

USED, NOTED, TRANSLATED, REFUSED = "used", "noted", "translated", "refused"

MEGATRON_LM, NEWER_MEGATRON_LM = "Megatron-LM", "a newer Megatron-LM"
MINDSPEED, MINDSPEED_LLM = "MindSpeed", "MindSpeed-LLM"


@dataclass(frozen=True)
class Verdict:
    """One verdict on flags.

    Attributes:
        kind: `NOTED` or `REFUSED`.
        source: whose flags they are.
        reason: one sentence: why the flag changes nothing, or why it is refused.
        options: option strings; ``*`` matches anything.
        remedy: for a refusal, the way out.
        values: the values that the verdict is about; empty for all.
    """

    kind: str
    source: str
    reason: str
    options: tuple[str, ...]
    remedy: str = ""
    values: tuple[str, ...] = ()

    def covers(self, option: str, values: tuple[str, ...] | None = None) -> bool:
        """Return whether the verdict is about an option, and about the values given to it."""
        if not any(fnmatchcase(option, pattern) for pattern in self.options):
            return False
        return not self.values or values is None or (bool(values) and set(values) <= set(self.values))

    def __str__(self) -> str:
        """Return a sentence for somebody who gave the flag."""
        said = "changes nothing" if self.kind == NOTED else "is refused"
        return f"this flag of {self.source} {said} here: {self.reason}"


def noted(source: str, reasons: Mapping[str, str], values: tuple[str, ...] = ()) -> tuple[Verdict, ...]:
    """Return the verdicts of a table from reasons to option strings."""
    return tuple(
        Verdict(NOTED, source, reason, tuple(options.split()), values=values)
        for reason, options in reasons.items()
    )


def refused(
    source: str, reasons: Mapping[str, tuple[str, str]], values: tuple[str, ...] = ()
) -> tuple[Verdict, ...]:
    """Return the verdicts of a table from reasons to the way out and option strings."""
    return tuple(
        Verdict(REFUSED, source, reason, tuple(options.split()), remedy, values)
        for reason, (remedy, options) in reasons.items()
    )
