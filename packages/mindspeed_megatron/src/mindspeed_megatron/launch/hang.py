"""Pulses of the ranks of a training, and the rank that all others wait for; without torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

LONGEST_PULSE = 4000
"""Bytes of a pulse in a pipe, which takes so many at once or none of them."""
_STOPPED = ("stopped", "tracing-stop")
_WRITER = "background_main"
"""In the command line of a process that writes checkpoints."""


@dataclass(frozen=True)
class Pulse:
    """The state of one rank, as it tells the others or its supervisor.

    Attributes:
        beat: grows with every message.
        still: seconds since the rank last made progress.
        waits: the main thread is inside a collective, or waits for the device.
        place: the innermost frame, ``function (file:line)``, and what the schedule was doing.
        stack: the innermost frames as text; only once the rank has stood still for a while.
        done: the rank trains no more.
        note: the processes of the rank that are stopped.
        step: training steps done.
        limit: seconds without progress after which the run hangs.
        period: seconds between two pulses.
    """

    beat: int
    still: float
    waits: bool = False
    place: str = ""
    stack: str = ""
    done: bool = False
    note: str = ""
    step: int = 0
    limit: float = 0.0
    period: float = 0.0


@dataclass(frozen=True)
class Finding:
    """The rank that keeps the others waiting, and one paragraph about it."""

    rank: int
    text: str


def longest_silence(limit: float, period: float) -> float:
    """Return the seconds without a word after which a rank, or the store, does not answer any more."""
    return max(limit / 2, 3 * period)


def seconds_missed(elapsed: float, period: float) -> float:
    """Return the seconds for which a process that looks again after ``period`` was stopped itself."""
    late = elapsed - period
    return late if late > period else 0.0


def find_culprit(
    pulses: Mapping[int, Pulse | None],
    silent: Mapping[int, float],
    reasons: Mapping[int, str] | None = None,
) -> Finding:
    """Choose the rank that the others wait for.

    Args:
        pulses: the last message of each rank; None for a rank that never sent one.
        silent: seconds since the last message of the ranks that send none any more.
        reasons: why a rank is silent, where that is known.
    """
    world = len(pulses)
    others = f"; the other {world - 1} wait for it" if world > 1 else ""
    reasons = reasons or {}
    for rank in sorted(silent, key=lambda rank: (rank not in reasons, rank)):
        why = reasons.get(rank, "stopped, swapping, or stuck outside Python")
        return Finding(rank, f"rank {rank} has not answered for {silent[rank]:.0f} s ({why}){others}")
    active = {rank: pulse for rank, pulse in pulses.items() if pulse is not None and not pulse.done}
    busy = {rank: pulse for rank, pulse in active.items() if not pulse.waits}
    if busy:
        # Of several the one that has been still for longest: the others may only have followed.
        rank, pulse = max(busy.items(), key=lambda item: (bool(item[1].note), item[1].still, -item[0]))
        where = f"\n{pulse.stack.rstrip()}" if pulse.stack else ""
        note = f" ({pulse.note})" if pulse.note else ""
        return Finding(
            rank, f"rank {rank} has been in {pulse.place} for {pulse.still:.0f} s{note}{others}{where}"
        )
    places = "\n".join(f"  rank {rank}: {pulse.place}" for rank, pulse in sorted(active.items()))
    first = min(active, default=0)
    return Finding(
        first,
        f"every rank waits in a collective, and not all in the same one or the network is down:\n{places}",
    )


def message(finding: Finding, seconds: float, step: int) -> str:
    """Return what is said when a run hangs."""
    since = f"after step {step}"
    return f"error: no progress for {seconds:.0f} s (--hang-timeout-minutes) {since}: {finding.text}"


class Pulses:
    """The pulses of the workers of one attempt, as their supervisor hears them."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Listen to the ranks of these processes."""
        self._pids = dict(pids)
        self._last: dict[int, Pulse] = {}
        self._heard: dict[int, float] = {}
        self._rest: dict[int, bytes] = {}
        self._looked: float | None = None

    def look(self) -> None:
        """Note that this process looks again: what it missed while it was stopped itself is no silence.

        Ranks that were stopped with it may need a moment longer until they speak.
        """
        now, period = time.monotonic(), self.period
        if period is not None and self._looked is not None:
            missed = seconds_missed(now - self._looked, period)
            self._heard = {rank: min(now, heard + missed) for rank, heard in self._heard.items()}
        self._looked = now

    def hear(self, rank: int, data: bytes) -> None:
        """Take what came from a rank."""
        *lines, self._rest[rank] = (self._rest.get(rank, b"") + data).split(b"\n")
        for line in lines[-1:]:
            if not self._heard:
                # A rank that never says a word is silent since the first one spoke.
                self._heard = dict.fromkeys(self._pids, time.monotonic())
            self._last[rank] = read_pulse(line)
            self._heard[rank] = time.monotonic()

    def end(self, rank: int) -> None:
        """Forget a rank whose process has ended."""
        for known in (self._pids, self._last, self._heard):
            known.pop(rank, None)

    @property
    def period(self) -> float | None:
        """Return the seconds after which to look again; None while there is nothing to look at."""
        periods = [pulse.period for pulse in self._last.values() if not pulse.done]
        return min(periods, default=None)

    @property
    def step(self) -> int:
        """Return the training steps that were done."""
        return max((pulse.step for pulse in self._last.values()), default=0)

    @property
    def limit(self) -> float:
        """Return the seconds without progress after which the run hangs."""
        return max((pulse.limit for pulse in self._last.values()), default=0.0)

    def finding(self) -> Finding | None:
        """Return the rank that the others wait for; None as long as the run gets on."""
        now, limit, period = time.monotonic(), self.limit, self.period
        if period is None:
            return None
        done = {rank for rank, pulse in self._last.items() if pulse.done}
        since = {rank: now - heard for rank, heard in self._heard.items() if rank not in done}
        before = {rank: pulse.still for rank, pulse in self._last.items()}
        still = max(age + before.get(rank, 0.0) for rank, age in since.items())
        if still <= limit:
            return None
        silent = {rank: age for rank, age in since.items() if age > longest_silence(limit, period)}
        reasons = {rank: "it is stopped by a signal" for rank in silent if is_stopped(self._pids[rank])}
        return find_culprit({rank: self._last.get(rank) for rank in self._pids}, silent, reasons)


def read_pulse(line: bytes | str) -> Pulse:
    """Return the pulse in a line of JSON; fields of other versions are left out."""
    written = json.loads(line)
    return Pulse(**{one.name: written[one.name] for one in fields(Pulse) if one.name in written})


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (``SIGSTOP``, Ctrl-Z, a debugger)."""
    import psutil

    try:
        return psutil.Process(pid).status() in _STOPPED
    except psutil.Error:
        return False


def kill_stopped_children() -> None:
    """Kill the processes started by this one that are stopped: they would outlive it without an end."""
    import psutil

    with suppress(psutil.Error):
        for child in _stopped_children():
            with suppress(psutil.Error):
                child.kill()


def stopped_children() -> str:
    """Name the processes started by this one that are stopped; an empty string where there are none."""
    import psutil

    named = []
    with suppress(psutil.Error):
        for child in _stopped_children():
            role = "writes checkpoints" if _WRITER in " ".join(child.cmdline()) else "loads data"
            named.append(f"its process {child.pid}, which {role}, is stopped by a signal")
    return "; ".join(named)


def _stopped_children() -> Iterator[Any]:
    import psutil

    return (child for child in psutil.Process().children(recursive=True) if is_stopped(child.pid))
