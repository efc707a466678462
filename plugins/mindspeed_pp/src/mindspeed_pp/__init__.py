"""Pipeline schedules as data: actions per rank, one lint, one simulator, one executor."""

from __future__ import annotations

from mindspeed_pp.actions import SI, SO, A, Action, B, D, F, G, O, R, W, X
from mindspeed_pp.placement import Placement, loop, vee
from mindspeed_pp.rule import Context, schedule
from mindspeed_pp.schedule import Schedule

__version__ = "0.1.0"

__all__ = [
    "SI",
    "SO",
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
    "X",
    "loop",
    "schedule",
    "vee",
]
