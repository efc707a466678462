"""Schedules of the learning rate under names of their own, inside megatron-core's.

megatron-core's scheduler warms up, counts, keeps each group's bounds, and saves and compares itself in
checkpoints. Here a function takes the place of the shapes that it knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mindspeed_core.errors import UserError

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Scheduler = TypeVar("Scheduler")


@dataclass(frozen=True)
class SchedulePoint:
    """Position of a schedule, for one group of parameters.

    Attributes:
        step: samples trained so far; megatron-core counts schedules in samples.
        warmup_steps: samples of the warm-up; ``step`` lies behind it.
        decay_steps: samples at the end of the decay, counted from the start; ``step`` does not lie behind it.
        max_lr: the peak learning rate, ``--lr``, or the group's own (``--decoupled-lr``).
        min_lr: the lowest, ``--min-lr`` or the group's own.
    """

    step: int
    warmup_steps: int
    decay_steps: int
    max_lr: float
    min_lr: float

    @property
    def fraction(self) -> float:
        """Part of the decay that is done, from 0 at the end of the warm-up to 1."""
        return (self.step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)


Schedule = Callable[[SchedulePoint], float]


def follow_schedule(
    session: Session, scheduler: Scheduler, schedules: Mapping[str, Schedule], *, owner: str
) -> Scheduler:
    """Let a scheduler of megatron-core follow the function that ``--lr-decay-style`` names.

    The warm-up stays linear and ``--min-lr`` holds behind the end of the decay. A checkpoint holds the name:
    resuming with another is refused, as with megatron-core's own. Call it from a wrapper of
    ``build_scheduler``; nothing changes where the flag names something else.

    Args:
        session: the session.
        scheduler: megatron-core's ``OptimizerParamScheduler``.
        schedules: by name, the learning rate between warm-up and end of the decay.
        owner: the feature's name.

    Returns:
        The same scheduler.

    Raises:
        UserError: a function returns something that is no learning rate.
    """
    name: str = getattr(session.args, "lr_decay_style", "")
    if name not in schedules:
        return scheduler
    changed: Any = scheduler
    rate = partial(_learning_rate, changed, name, schedules[name], changed.get_lr)
    session.instances.set(owner, changed, "get_lr", rate)
    # It stays when the session closes: megatron-core then says that it does not know the name.
    changed.lr_decay_style = name
    changed.step(0)
    return scheduler


def _learning_rate(
    scheduler: Any, name: str, function: Schedule, own: Callable[[Any], float], param_group: Mapping[str, Any]
) -> float:
    step, end = scheduler.num_steps, scheduler.lr_decay_steps
    warming_up = 0 < scheduler.lr_warmup_steps >= step
    if scheduler.lr_decay_style != name or warming_up or step > end:
        # The checkpoint named another schedule and was to be followed, or the function has no part in it.
        return own(param_group)
    point = SchedulePoint(
        step=step,
        warmup_steps=scheduler.lr_warmup_steps,
        decay_steps=end,
        max_lr=param_group.get("max_lr", scheduler.max_lr),
        min_lr=param_group.get("min_lr", scheduler.min_lr),
    )
    rate = float(function(point))
    if not (math.isfinite(rate) and rate >= 0.0):
        raise UserError(f"--lr-decay-style {name}: its function gives {rate} as learning rate at {point}")
    return rate
