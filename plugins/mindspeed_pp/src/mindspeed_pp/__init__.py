"""Pipeline schedules as data: actions per rank, one lint, one simulator, one executor."""

from __future__ import annotations

from mindspeed_pp.actions import A, Action, B, D, F, G, O, R, W
from mindspeed_pp.placement import Placement, loop, vee
from mindspeed_pp.rule import Context, schedule
from mindspeed_pp.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "A",
    "Action",
    "B",
    "Context",
    "D",
    "F",
    "G",
    "O",
    "Placement",
    "R",
    "Schedule",
    "W",
    "loop",
    "schedule",
    "vee",
]
