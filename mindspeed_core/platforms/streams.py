"""Streams and events of a machine that executes in program order: nothing to order, every wait is over.

The classes answer every method that code written for device streams calls. Shared by the base platform and
the emulation of ``torch.cuda`` on the cpu platform.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any


class HostStream:
    """A stream on which everything has finished as soon as it was launched.

    Attributes:
        priority: kept, without effect.
        device_index: always 0.
        cuda_stream: the handle that kernels would be launched on: 0, the default stream.
    """

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        """Accept what a device stream's constructor accepts."""
        self.priority = priority
        self.device_index = 0
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None:
        """Return at once: everything on ``stream`` has finished."""

    def wait_event(self, event: Any) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once: everything on this stream has finished."""

    def query(self) -> bool:
        """Return True: everything has finished."""
        return True

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Record an event (a new one without timing by default) and return it."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> HostStream:
        """Enter the stream."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the stream; exceptions pass through."""


class HostEvent:
    """A moment of the host's clock."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
    ) -> None:
        """Accept what a device event's constructor accepts; only timing matters."""
        self.enable_timing = enable_timing
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once: the event has happened."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of them was made without ``enable_timing=True`` or not recorded, as on a device.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("elapsed_time needs two events created with enable_timing=True")
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end_event._seconds - self._seconds) * 1e3
