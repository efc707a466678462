"""Positions of pipeline ranks, so that the one that all others wait for can be named.

A thread writes this rank's position into the store of the process group once the rank stands still, and reads
those of the others when somebody asks for the rank that is stuck.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from mindspeed_pp.actions import BACKWARD, FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT, Action
from mindspeed_pp.schedule import Schedule, needs, provides

logger = logging.getLogger("mindspeed_core")

SHARE = 0.9
"""Of the time-out of messages, after which a rank that stands still says so."""
_PERIOD = 1.0
_NAMES = {
    FORWARD: "forward pass",
    INPUT_GRADIENT: "gradient of the input",
    WEIGHT_GRADIENT: "gradient of the weights",
    BACKWARD: "backward pass",
    RECOMPUTE: "forward pass again",
}

Place = tuple[int, int]
"""Number of the batch since the session began, and item of the rank's list."""


def described(schedule: Schedule, rank: int, item: int) -> str:
    """Return where a rank is in its list, with stage, chunk and micro-batch."""
    order = schedule.orders[rank]
    if item < 0:
        return "before its first item"
    if item >= len(order):
        return f"behind its last item of {len(order)}"
    action = order[item]
    parts = " beside ".join(_part(schedule, part) for part in action.flat())
    return f"at item {item} of {len(order)} ({action}: {parts})"


def _part(schedule: Schedule, part: Action) -> str:
    chunk = schedule.placement.chunk(part.stage)
    name = _NAMES.get(part.op, f"action {part.op}")
    return f"{name} of stage {part.stage}, chunk {chunk}, micro-batch {part.microbatch}"


def holding_up(schedule: Schedule, rank: int, items: Mapping[int, int | None]) -> list[int]:
    """Return the ranks from one that waits to the one that it waits for in the end.

    Args:
        schedule: that runs.
        rank: that waits.
        items: of each rank the item that it has not finished, None where nobody knows.
    """
    made_at = {
        result: (owner, at)
        for owner, order in enumerate(schedule.orders)
        for at, action in enumerate(order)
        for part in action.flat()
        for result in provides(part)
    }
    path = [rank]
    while True:
        item, order = items[path[-1]], schedule.orders[path[-1]]
        if item is None or not 0 <= item < len(order):
            return path
        waited_for = []
        for part in order[item].flat():
            for need in needs(part, schedule):
                owner, at = made_at[need]
                there = items[owner]
                if owner != path[-1] and (there is None or there <= at):
                    waited_for.append(owner)
        if not waited_for or waited_for[0] in path:
            return path
        path.append(waited_for[0])


class Positions:
    """The positions of the ranks of one pipeline.

    Attributes:
        batch: number of the batch since the session began.
        item: of this rank's list, -1 before the first one.
    """

    def __init__(self, ranks: Sequence[int], rank: int, seconds: float) -> None:
        """Prepare; `start` begins to tell.

        Args:
            ranks: of the pipeline, in the world.
            rank: this pipeline rank.
            seconds: time-out of messages.
        """
        self.batch, self.item = 0, -1
        self._ranks, self._rank, self._seconds = list(ranks), rank, seconds
        self._schedule: Schedule | None = None
        # A connection of its own: whoever waits on the shared one would make this one wait too.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._told: Place | None = None

    def start(self) -> None:
        """Begin to tell where this rank is."""
        self._store.set(self._key(self._rank), "")
        self._thread = threading.Thread(target=self._tell, name="mindspeed pp positions", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(2 * _PERIOD)

    def begin(self, schedule: Schedule) -> None:
        """Begin a batch."""
        self.batch, self.item, self._schedule = self.batch + 1, -1, schedule

    def finding(self, first_unfinished: Mapping[int, int] | None = None) -> str:
        """Return which rank the others wait for and where it is, after looking into the store.

        Args:
            first_unfinished: of ranks the first item that they may not have finished, from messages that
                arrived.
        """
        schedule = self._schedule
        assert schedule is not None
        items: dict[int, int | None] = {self._rank: self.item}
        still: dict[int, float] = {}
        for rank in range(len(self._ranks)):
            if rank == self._rank:
                continue
            announcer = self._heard(rank)
            least = (first_unfinished or {}).get(rank)
            items[rank] = least
            if announcer is not None:
                batch, item, since = announcer
                if batch != self.batch:
                    item = len(schedule.orders[rank]) if batch > self.batch else -1
                if item >= (-1 if least is None else least):
                    items[rank], still[rank] = item, since
        *waiting, last = holding_up(schedule, self._rank, items)
        if last == self._rank:
            return "no pipeline rank is known to be behind it"
        others = ", ".join(f"pipeline rank {rank}" for rank in waiting[1:])
        between = f"; {others} waits too" if others else ""
        name = f"pipeline rank {last} (rank {self._ranks[last]}), "
        at = items[last]
        if last in still and at is not None:
            return f"all wait for {name}{described(schedule, last, at)} for {still[last]:.0f} s{between}"
        where = "which has not said where it is"
        if at is not None:
            where += f", and did not finish what comes {described(schedule, last, at)}"
        return f"all wait for {name}{where}{between}; it is stopped, or has ended"

    def _key(self, rank: int) -> str:
        return f"mindspeed/pp/positions/{self._ranks[rank]}"

    def _heard(self, rank: int) -> tuple[int, int, float] | None:
        key = self._key(rank)
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        if not text:
            return None
        batch, item, since = json.loads(text)
        return int(batch), int(item), time.time() - float(since)

    def _tell(self) -> None:
        # Seconds of a clock that other processes read too.
        seen, since, said = (0, -1), time.time(), False
        while not self._end.wait(min(_PERIOD, self._seconds / 8)):
            now = self.batch, self.item
            try:
                if now != seen:
                    seen, since, said = now, time.time(), False
                    if self._told is not None:
                        self._store.set(self._key(self._rank), "")
                        self._told = None
                    continue
                if now != self._told:
                    self._store.set(self._key(self._rank), json.dumps([*now, since]))
                    self._told = now
                inside = self._schedule is not None and self.item < len(self._schedule.orders[self._rank])
                if inside and not said and time.time() - since > SHARE * self._seconds:
                    said = True
                    self._say(since)
            except (RuntimeError, OSError) as error:
                logger.debug("positions of pipeline ranks: the store does not answer (%s)", error)

    def _say(self, since: float) -> None:
        schedule = self._schedule
        assert schedule is not None
        logger.error(
            "--pipeline-schedule %s: pipeline rank %d has been %s for %.0f s; %s",
            schedule.name, self._rank, described(schedule, self._rank, self.item), time.time() - since,
            self.finding(),
        )  # fmt: skip


def announcer(positions: Positions | None) -> Callable[[int], Any]:
    """Return the function that a step tells its items to."""
    if positions is None:
        return lambda item: None

    def tell(item: int) -> None:
        positions.item = item

    return tell
