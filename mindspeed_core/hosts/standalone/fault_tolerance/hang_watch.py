"""Watch for hanging runs: find the rank that all others wait for, report where it is, and end the run.

Each rank has a thread that writes to the store how far the rank is and where its main thread stands, and
reads what the others wrote. A rank that writes nothing any more is stopped or stuck in a call that never
returns to Python; a rank that is not in a collective is the one that keeps the others in theirs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import uuid
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_core.launch import worker
from mindspeed_core.terminal.foreign_text import clean

if TYPE_CHECKING:
    from mindspeed_core.run import DistInfo, Run

logger = logging.getLogger("mindspeed_core")

SHARE_OF_COLLECTIVE_TIMEOUT = 0.8
"""Before the timeout of collectives, whose message names no cause."""
_WAITS = re.compile(
    r"\.(wait|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|recv|send|synchronize|item|tolist)\("
)
_LONGEST_PERIOD = 10.0
_EXIT_PROBLEMS = 1
_FRAMES = 8


@dataclass(frozen=True)
class Pulse:
    """The state of one rank, as it writes it to the store.

    Attributes:
        beat: grows with every message.
        still: seconds since the rank last made progress.
        waits: the main thread is inside a collective, or waits for the device.
        place: the innermost frame, ``function (file:line)``, and what the schedule was doing.
        stack: the innermost frames as text; only once the rank has stood still for a while.
        done: the rank trains no more.
    """

    beat: int
    still: float
    waits: bool = False
    place: str = ""
    stack: str = ""
    done: bool = False


@dataclass(frozen=True)
class Finding:
    """The rank that keeps the others waiting, and one paragraph about it."""

    rank: int
    text: str


def find_culprit(pulses: Mapping[int, Pulse | None], silent: Mapping[int, float]) -> Finding:
    """Choose the rank that the others wait for.

    Args:
        pulses: the last message of each rank; None for a rank that never sent one.
        silent: seconds since the last message of the ranks that send none any more.
    """
    world = len(pulses)
    others = f"; the other {world - 1} wait for it" if world > 1 else ""
    for rank in sorted(silent):
        text = f"rank {rank} has not answered for {silent[rank]:.0f} s"
        return Finding(rank, f"{text} (stopped, swapping, or stuck outside Python){others}")
    active = {rank: pulse for rank, pulse in pulses.items() if pulse is not None and not pulse.done}
    busy = {rank: pulse for rank, pulse in active.items() if not pulse.waits}
    if busy:
        # Of several the one that has been still for longest: the others may only have followed.
        rank, pulse = max(busy.items(), key=lambda item: (item[1].still, -item[0]))
        where = f"\n{pulse.stack.rstrip()}" if pulse.stack else ""
        return Finding(rank, f"rank {rank} has been in {pulse.place} for {pulse.still:.0f} s{others}{where}")
    places = "\n".join(f"  rank {rank}: {pulse.place}" for rank, pulse in sorted(active.items()))
    first = min(active, default=0)
    return Finding(
        first,
        f"every rank waits in a collective, and not all in the same one or the network is down:\n{places}",
    )


@dataclass
class Progress:
    """A count that grows with every micro-batch and every step."""

    count: int = 0


def shared_name(info: DistInfo) -> str:
    """Return a name that the ranks of this training share and no other training does; collective.

    Agents of torchrun count restarts each for itself, and their store outlives an attempt: neither names one.
    """
    if info.world_size == 1:
        return ""
    store = dist.distributed_c10d._get_default_store()
    turn = store.add(f"mindspeed/hang/{info.rank}", 1)
    if info.rank == 0:
        store.set(f"mindspeed/hang/name/{turn}", uuid.uuid4().hex)
    return store.get(f"mindspeed/hang/name/{turn}").decode()


class HangWatch:
    """The watch of one rank; a context around the training loop."""

    def __init__(self, run: Run, seconds: float) -> None:
        """Prepare to end the run when its `Progress` stands still for ``seconds``; 0 for no watch."""
        self._run = run
        self.seconds = seconds
        self.period = max(0.05, min(seconds / 8, _LONGEST_PERIOD))
        self._name = ""
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.current_thread().ident
        self._beat = 0
        self._progress = -1
        self._moved = time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}

    def __enter__(self) -> HangWatch:
        if self.seconds > 0:
            self._name = shared_name(self._run.dist)
            self._thread = threading.Thread(target=self._watch, name="mindspeed hang watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(2 * self.period)

    def _watch(self) -> None:
        store = self._connect()
        while not self._end.wait(self.period):
            try:
                self._look(store)
            except (RuntimeError, OSError) as error:
                # The store lives in rank 0 (or its agent); without it nobody can be asked.
                if self._still() > self.seconds:
                    self._end_run(Finding(0, f"rank 0, which serves the store, does not answer ({error})"))
        if store is not None:
            try:
                store.set(str(self._run.dist.rank), json.dumps(asdict(Pulse(self._beat + 1, 0.0, done=True))))
            except (RuntimeError, OSError):
                logger.debug("the store was gone before the hang watch ended")

    def _connect(self) -> Any:
        if self._run.dist.world_size == 1:
            return None
        # A client of its own: a wait of the main thread on the shared one would block this one too.
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=timedelta(seconds=max(5.0, 4 * self.period)),
        )
        return dist.PrefixStore(f"mindspeed/hang/{self._name}", store)

    def _still(self) -> float:
        now = time.monotonic()
        count = self._run.session.state(Progress).count
        if count != self._progress:
            self._progress, self._moved = count, now
        return now - self._moved

    def _look(self, store: Any) -> None:
        rank, world = self._run.dist.rank, self._run.dist.world_size
        still = self._still()
        mine = self._pulse(still)
        if store is None:
            if still > self.seconds:
                self._end_run(find_culprit({0: mine}, {}))
            return
        store.set(str(rank), json.dumps(asdict(mine)))
        if store.check(["verdict"]):
            if not self._end.is_set():
                os._exit(_EXIT_PROBLEMS)
            return
        now = time.monotonic()
        pulses: dict[int, Pulse | None] = {rank: mine}
        silent: dict[int, float] = {}
        for other in range(world):
            if other == rank:
                continue
            message = store.get(str(other)).decode() if store.check([str(other)]) else ""
            before, since = self._heard.get(other, ("-", now))
            if message != before:
                since = now
                self._heard[other] = (message, now)
            pulses[other] = Pulse(**json.loads(message)) if message else None
            if now - since > max(self.seconds / 2, 3 * self.period) and not (pulses[other] or mine).done:
                silent[other] = now - since
        if still > self.seconds and store.add("claim", 1) == 1:
            finding = find_culprit(pulses, silent)
            store.set("verdict", str(finding.rank))
            self._end_run(finding)

    def _pulse(self, still: float) -> Pulse:
        self._beat += 1
        if still < self.seconds / 4:
            return Pulse(self._beat, still)
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        if not stack:
            return Pulse(self._beat, still)
        inner = stack[-1]
        waits = "torch/distributed" in inner.filename or bool(_WAITS.search(inner.line or ""))
        place = f"{inner.name} ({inner.filename}:{inner.lineno})"
        doing = self._run.context.doing
        if doing:
            place += f" in {doing}"
        text = "".join(traceback.format_list(stack[-_FRAMES:]))
        return Pulse(self._beat, still, waits, place, text)

    def _end_run(self, finding: Finding) -> None:
        if self._end.is_set():
            return
        since = f"after step {self._run.iteration}"
        text = f"no progress for {self.seconds:.0f} s (--hang-timeout-minutes) {since}: {finding.text}"
        if not worker.send_message("hang", f"error: {text}", rank=finding.rank):
            print(f"error: {clean(text, lines=True)}", file=sys.stderr, flush=True)
        os._exit(_EXIT_PROBLEMS)


def watch(run: Run) -> HangWatch:
    """Make the watch that the arguments ask for."""
    minutes = run.args.hang_timeout_minutes
    return HangWatch(run, 0.0 if minutes == 0 else seconds_to_hang(run.args))


def seconds_to_hang(args: Namespace) -> float:
    """Return the seconds without progress after which something hangs; the default where no watch is kept."""
    given = args.hang_timeout_minutes
    return 60.0 * float(given or SHARE_OF_COLLECTIVE_TIMEOUT * args.distributed_timeout_minutes)
