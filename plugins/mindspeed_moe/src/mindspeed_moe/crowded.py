"""Choose what a call of experts keeps when a rank gets too many rows, and count such calls."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_moe.options import ACTIVATION, DISABLED, LEVEL0, LEVEL1

_ORDER = (DISABLED, ACTIVATION, LEVEL0, LEVEL1)
"""From the level that keeps most to the one that keeps least."""


@dataclass
class Calls:
    """The calls of layers of experts in a step.

    Attributes:
        all: how many there were.
        switched: how many kept less than they were told to.
    """

    all: int = 0
    switched: int = 0

    def begin(self) -> None:
        """Begin a step."""
        self.all = self.switched = 0


def level_of_call(level: str, most: int, mean: float, scale: float, calls: Calls) -> str:
    """Return what a call keeps, and count it.

    Args:
        level: what it is told to keep, one of the levels of `mindspeed_moe.options`.
        most: rows that come to the rank to which most of them come.
        mean: of the rows of all ranks.
        scale: above so many times the mean the call keeps what `LEVEL0` does, above twice as many `LEVEL1`.
        calls: of the step.
    """
    found = level
    if most > scale * mean:
        least = LEVEL1 if most > 2 * scale * mean else LEVEL0
        found = max(level, least, key=_ORDER.index)
    calls.all += 1
    calls.switched += found != level
    return found
