"""Streams and events as partial orders: a stream knows how much of every other one is done before its work.

A wait orders the waiting stream and nobody else. The host is a stream too: what it launches comes after all
that it has waited for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from mindspeed_testing.lagging.findings import Finding, Findings, Frames, calling_frames, described

_QUERIES = 3
"""An event says so often that it is under way before it has happened."""


class Device(Protocol):
    """Interface that streams and events need of their device."""

    host: LaggingHost
    findings: Findings

    def settle(self, stream: LaggingStream) -> None:
        """Do what is launched on a stream."""

    def current(self) -> LaggingStream:
        """Return the stream that work is launched on now."""

    def enter(self, stream: LaggingStream) -> None:
        """Launch on a stream from now on."""

    def leave(self) -> None:
        """Launch on the stream before."""


class LaggingStream:
    """A stream of a lagging device.

    Attributes:
        number: tells it from the others.
        name: for reports.
        count: work launched so far.
        known: for each stream, how much of its work is done before what is launched here next.
    """

    device_index = 0
    cuda_stream = 0

    def __init__(self, device: Device, number: int, name: str, priority: int = 0) -> None:
        """Start with nothing launched."""
        self.device, self.number, self.name, self.priority = device, number, name, priority
        self.count = 0
        self.known: dict[int, int] = {}
        self.changed = 0
        self._joined_host = -1

    def launch(self) -> int:
        """Launch one piece of work; return its number."""
        host = self.device.host
        if host is not self and self._joined_host != host.changed:
            self._joined_host = host.changed
            self.join(host.known)
        self.count += 1
        self.known[self.number] = self.count
        if host is self:
            # What the host does itself is done before it launches anything else.
            self.changed += 1
        return self.count

    def knows(self, number: int, count: int) -> bool:
        """Return whether a piece of work of a stream is done before the next one here."""
        return self.known.get(number, 0) >= count

    def join(self, progress: Mapping[int, int]) -> None:
        """Come after work of other streams, by how much of each is done."""
        own = self.known
        grown = False
        for number, count in progress.items():
            if own.get(number, 0) < count:
                own[number] = count
                grown = True
        if grown:
            self.changed += 1
            self.device.settle(self)

    def wait_stream(self, stream: Any) -> None:
        """Come after everything launched on ``stream`` so far."""
        self.join(stream.known)

    def wait_event(self, event: LaggingEvent) -> None:
        """Come after an event."""
        event.wait(self)

    def record_event(self, event: LaggingEvent | None = None) -> LaggingEvent:
        """Record an event, a new one by default."""
        event = LaggingEvent(self.device) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for everything launched here."""
        self.device.host.wait(self.known)

    def query(self) -> bool:
        """Return whether the host knows that everything is done."""
        return self.device.host.knows(self.number, self.count)

    def __enter__(self) -> LaggingStream:
        """Launch here from now on."""
        self.device.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Launch where it was before."""
        self.device.leave()


class LaggingHost(LaggingStream):
    """The program itself.

    Attributes:
        waits: how often it waited for work that it did not know done, by the line that waits.
    """

    def __init__(self, device: Device, number: int) -> None:
        """Start with nothing known."""
        super().__init__(device, number, "the host")
        self.waits: Counter[str] = Counter()

    def wait(self, progress: Mapping[int, int]) -> None:
        """Wait for work of streams, by how much of each has to be done."""
        before = self.changed
        self.join(progress)
        if self.changed != before:
            self.waits[described(calling_frames()[:1]).strip()] += 1


class LaggingEvent:
    """A point in a stream."""

    def __init__(self, device: Device, enable_timing: bool = False, **_: Any) -> None:
        """Start unrecorded."""
        self.device, self.enable_timing = device, enable_timing
        self._known: dict[int, int] | None = None
        self._made: Frames = calling_frames()
        self._seconds = 0.0
        self._queries = _QUERIES

    def record(self, stream: LaggingStream | None = None) -> None:
        """Take the point that a stream has reached, the current one by default."""
        stream = self.device.current() if stream is None else stream
        self._known = dict(stream.known)
        self._seconds, self._queries = time.perf_counter(), _QUERIES

    def wait(self, stream: LaggingStream | None = None) -> None:
        """Let a stream come after it, the current one by default."""
        self._reach(self.device.current() if stream is None else stream)

    def synchronize(self) -> None:
        """Let the host wait for it."""
        if self._known is not None:
            self.device.host.wait(self._known)
        self._reach(self.device.host)

    def query(self) -> bool:
        """Return whether it has happened: as late as a loop that asks can bear."""
        if self._known is None:
            return True
        self._queries -= 1
        if self._queries > 0:
            return False
        # It has happened without a wait of the host.
        self._reach(self.device.host)
        return True

    def elapsed_time(self, end_event: LaggingEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: one of them was made without ``enable_timing=True`` or not recorded, as on a device.
        """
        if not (self.enable_timing and end_event.enable_timing):
            raise RuntimeError("elapsed_time needs two events created with enable_timing=True")
        if self._known is None or end_event._known is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end_event._seconds - self._seconds) * 1e3

    def _reach(self, stream: LaggingStream) -> None:
        if self._known is None:
            finding = f"{stream.name} waits for an event that was never recorded, and does not wait"
            self.device.findings.add(Finding("event never recorded", finding, calling_frames(), self._made))
            return
        stream.join(self._known)
