"""Numbers that features record while a step runs, reduced over ranks once per logged step, and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_core.runtime.gather import all_gather_values

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_REDUCTIONS = ("mean", "sum", "max", "min")


class Metrics:
    """Named numbers with a reduction over micro-batches and ranks.

    Only ranks that recorded a name take part in its mean, so a number that exists on the last pipeline stage
    alone (everything about the loss) comes out right on the rank that logs.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._values: dict[str, tuple[str, Any, int]] = {}

    def add(self, name: str, value: float | torch.Tensor, reduction: str = "mean") -> None:
        """Record a number; several in one step are combined by ``reduction``.

        Args:
            name: key under which it is logged.
            value: a number or a scalar tensor (detached; not synchronised until the step is logged).
            reduction: ``mean``, ``sum``, ``max`` or ``min``, over micro-batches and ranks alike.
        """
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"metric {name!r}: reduction {reduction!r} is not one of {', '.join(_REDUCTIONS)}"
            )
        detach = getattr(value, "detach", None)
        if detach is not None:
            value = detach()
        if name not in self._values:
            self._values[name] = (reduction, value, 1)
            return
        known, old, count = self._values[name]
        if known != reduction:
            raise ValueError(f"metric {name!r} was recorded with reduction {known!r} and now {reduction!r}")
        if reduction in ("mean", "sum"):
            combined: Any = old + value
        else:
            chooser = max if reduction == "max" else min
            combined = chooser(float(old), float(value))
        self._values[name] = (reduction, combined, count + 1)

    def names(self) -> list[str]:
        """Return the recorded names, in order."""
        return sorted(self._values)

    def local(self) -> dict[str, tuple[str, float, int]]:
        """Return what this rank recorded since `clear`: ``{name: (reduction, combined value, count)}``."""
        return {name: (how, float(value), count) for name, (how, value, count) in self._values.items()}

    def clear(self) -> None:
        """Remove all records."""
        self._values.clear()

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Combine what all ranks recorded; every rank must call it. Same result everywhere.

        Args:
            group: the ranks to combine, by default all; without ``torch.distributed`` only this process.
        """
        return combine(all_gather_values(self.local(), group))


def combine(parts: Sequence[Mapping[str, tuple[str, float, int]]]) -> dict[str, float]:
    """Combine the local records of several ranks into one number per name."""
    result: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part}):
        entries = [part[name] for part in parts if name in part]
        reduction = entries[0][0]
        values = [value for _, value, _ in entries]
        if reduction == "mean":
            result[name] = sum(values) / sum(count for _, _, count in entries)
        elif reduction == "sum":
            result[name] = sum(values)
        else:
            result[name] = max(values) if reduction == "max" else min(values)
    return result


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
