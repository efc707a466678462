"""megatron-core's timers as events: listeners hear when each part of a step begins and ends.

There is no stage for the backward pass of a micro-batch or for a transfer between pipeline stages, but
megatron-core starts and stops a timer around each of its own parts (``forward-compute``,
``backward-compute``, ``forward-recv``, ``all-grads-sync``, ``optimizer-inner-step`` …), as
``config.timers(name, log_level=…)``. For the duration of a step an object that tells listeners takes the
place of ``config.timers``, in whatever host; timers that were there (those of Megatron-LM's scripts) go on
below it. Without listeners nothing is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from mindspeed_megatron.unwrap import unwrap

if TYPE_CHECKING:
    from mindspeed_core.run import Run

_LARGEST_LEVEL = 2
"""Level of a timer that is asked for without one, as in megatron-core."""


class TimerListener(Protocol):
    """Hears of every timer; one that is told of a start is told of the end too, unless the step fails."""

    def timer_started(self, name: str, level: int, barrier: bool) -> None:
        """Hear that a part begins.

        Args:
            name: of the timer, ``forward-compute``.
            level: 1 for parts of a step, 2 for those of a micro-batch or transfer.
            barrier: whether ranks shall meet before the part is timed; who times nothing need not.
        """

    def timer_stopped(self, name: str, barrier: bool) -> None:
        """Hear that a part ends."""


class TimerEvents:
    """Stands in ``config.timers`` while somebody listens.

    Attributes:
        below: the timers that were there before, None for none.
        listeners: in the order in which they hear of a start; of an end they hear in the opposite one.
    """

    def __init__(self, below: Any = None) -> None:
        """Begin without listeners."""
        self.below = below
        self.listeners: list[TimerListener] = []
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Return the timer of a name, as megatron-core asks for it."""
        if log_level is not None:
            self._levels[name] = log_level
        level = self._levels.get(name, _LARGEST_LEVEL)
        below = None if self.below is None else self.below(name, log_level=log_level)
        return _Timer(self, name, level, below)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else is asked of the timers below."""
        if name.startswith("__") or "below" not in vars(self):
            raise AttributeError(name)
        return getattr(self.below, name)


class _Timer:
    """One use of a timer."""

    def __init__(self, events: TimerEvents, name: str, level: int, below: Any) -> None:
        self._events, self._name, self._level, self._below = events, name, level, below

    def start(self, barrier: bool = False) -> None:
        if self._below is not None:
            self._below.start(barrier=barrier)
        for listener in self._events.listeners:
            listener.timer_started(self._name, self._level, barrier)

    def stop(self, barrier: bool = False) -> None:
        for listener in reversed(self._events.listeners):
            listener.timer_stopped(self._name, barrier)
        if self._below is not None:
            self._below.stop(barrier=barrier)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_below" not in vars(self):
            raise AttributeError(name)
        return getattr(self._below, name)


@contextmanager
def listening(run: Run, listener: TimerListener) -> Iterator[None]:
    """Let a listener hear of the timers of a run's model and optimizer inside the context, one step usually.

    Contexts may be nested: the listeners share one `TimerEvents`. Leaving the last one restores the timers
    that were there. megatron-core's optimizers and models are heard; another optimizer has no timers.
    """
    placed: list[tuple[Any, TimerEvents]] = []
    by_timers: dict[int, TimerEvents] = {}
    for config in _configurations(run):
        timers = config.timers
        if isinstance(timers, TimerEvents):
            by_timers.setdefault(id(timers), timers)
            continue
        events = by_timers.get(id(timers))
        if events is None:
            events = by_timers[id(timers)] = TimerEvents(timers)
        config.timers = events
        placed.append((config, events))
    heard = list(dict.fromkeys(by_timers.values()))
    for events in heard:
        events.listeners.append(listener)
    try:
        yield
    finally:
        for events in heard:
            events.listeners.remove(listener)
        for config, events in reversed(placed):
            if config.timers is events:
                config.timers = events.below


def _configurations(run: Run) -> list[Any]:
    """Return every configuration through which megatron-core finds timers, each once."""
    found = [run.config, *(getattr(unwrap(chunk), "config", None) for chunk in run.model)]
    optimizer = run.optimizer
    if optimizer is not None:
        parts = getattr(optimizer, "chained_optimizers", [optimizer])
        found += [getattr(part, "config", None) for part in (optimizer, *parts)]
    return list({id(config): config for config in found if hasattr(config, "timers")}.values())
