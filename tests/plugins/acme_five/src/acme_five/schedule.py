"""A learning rate that falls by the same factor in every step."""

from __future__ import annotations

from mindspeed_core import SchedulePoint


def exponential(point: SchedulePoint) -> float:
    """Return the rate on its way to a thousandth of ``--lr``, or to ``--min-lr`` where that is higher."""
    return max(point.min_lr, point.max_lr * 1e-3**point.fraction)
