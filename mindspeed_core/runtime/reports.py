"""Numbers of a step that belong together: recorded as one entry, and printed as lines of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Report(dict[str, Any]):
    """Table that a wrapper of ``log_step`` adds to the numbers, where a single one does not say it.

    Attributes:
        lines: for people, printed below the line of the step where the host prints.
    """

    def __init__(self, values: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Join values of JSON types and the lines that say them."""
        super().__init__(values)
        self.lines = tuple(lines)


def report_lines(numbers: Mapping[str, Any]) -> list[str]:
    """Return the lines of every report among the numbers of a step, in their order."""
    return [line for value in numbers.values() if isinstance(value, Report) for line in value.lines]
