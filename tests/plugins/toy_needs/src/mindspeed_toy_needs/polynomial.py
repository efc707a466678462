"""A schedule of the learning rate under a name of its own."""

from __future__ import annotations

from mindspeed_core import SchedulePoint


def polynomial(point: SchedulePoint, power: float = 1.0) -> float:
    """Learning rate that falls to the lowest along a power of what is left of the decay."""
    return point.min_lr + (point.max_lr - point.min_lr) * (1.0 - point.fraction) ** power
