"""What a call of experts keeps when routers send a rank more rows than it should get; counts such calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mindspeed_moe.options import ACTIVATION, DISABLED, LEVEL0, LEVEL1

if TYPE_CHECKING:
    from mindspeed_core.run import Run

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


_active: Calls | None = None


def level_of_call(level: str, most: int, mean: float, scale: float) -> str:
    """Return what a call keeps.

    Args:
        level: what it is told to keep, one of the levels of `mindspeed_moe.options`.
        most: rows that come to the rank to which most of them come.
        mean: of the rows of all ranks.
        scale: above so many times the mean the call keeps what `LEVEL0` does, above twice as many `LEVEL1`.
    """
    found = level
    if most > scale * mean:
        least = LEVEL1 if most > 2 * scale * mean else LEVEL0
        found = max(level, least, key=_ORDER.index)
    if _active is not None:
        _active.all += 1
        _active.switched += found != level
    return found


@contextmanager
def counted_calls(run: Run) -> Iterator[None]:
    """Count inside, and record how many calls of a step there were and how many of them kept less."""
    global _active
    before, _active = _active, Calls()
    try:
        yield
        run.metrics.add("moe calls", float(_active.all), "mean")
        run.metrics.add("moe crowded calls", float(_active.switched), "mean")
    finally:
        _active = before
