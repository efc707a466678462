"""Watch for hanging runs: find the rank that all others wait for, report where it is, and end the run.

Each rank has a thread that tells how far the rank is and where its main thread stands. Under
``mindspeed-train --nproc`` it tells the supervisor, which decides. Elsewhere the ranks tell each other
through the store, and each rank has a second thread that waits for no store: the store may live in the very
rank that hangs. A rank that says nothing any more is stopped or stuck in a call that never returns to Python;
a rank that is not in a collective is the one that keeps the others in theirs.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mindspeed_megatron.launch import hang, worker
from mindspeed_megatron.launch.hang import Finding, Pulse, find_culprit, longest_silence
from mindspeed_megatron.launch.store import is_agent_store
from mindspeed_train.output import say

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

    def __init__(self, run: Run, seconds: float, last_words: Callable[[], str] = str) -> None:
        """Prepare to end the run when its `Progress` stands still for ``seconds``; 0 for no watch.

        ``last_words`` follow the message.
        """
        self._run = run
        self._last_words = last_words
        self.seconds = seconds
        self.period = max(0.05, min(seconds / 8, _LONGEST_PERIOD))
        self._name = ""
        self._end = threading.Event()
        self._threads: list[threading.Thread] = []
        self._main = threading.current_thread().ident
        self._beat = 0
        self._progress = -1
        self._moved = self._answered = time.monotonic()
        self._heard: dict[int, tuple[str, float]] = {}
        self._supervisor_stopped = False

    def __enter__(self) -> HangWatch:
        if self.seconds <= 0:
            return self
        if worker.supervised():
            self._start(self._report, "mindspeed hang watch")
        elif self._run.dist.world_size == 1:
            self._start(self._watch_alone, "mindspeed hang watch")
        else:
            # The name comes from the store already.
            self._start(self._watch_store, "mindspeed store watch")
            self._name = shared_name(self._run.dist)
            self._answered = time.monotonic()
            self._start(self._watch, "mindspeed hang watch")
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(2 * self.period)

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait(self) -> bool:
        """Wait for the next look; return False at the end of the watch.

        What this process missed while it was stopped (Ctrl-Z, a frozen container) is no hanging.
        """
        began = time.monotonic()
        ended = self._end.wait(self.period)
        missed = hang.seconds_missed(time.monotonic() - began, self.period)
        self._moved += missed
        self._answered += missed
        return not ended

    def _report(self) -> None:
        """Tell the supervisor, which finds ranks that hang; find out whether it is stopped itself."""
        worker.send_pulse(self._pulse(self._still()))
        while self._wait():
            worker.send_pulse(self._pulse(self._still()))
            if self._run.dist.local_rank == 0:
                self._look_at_supervisor()
        worker.send_pulse(Pulse(self._beat + 1, 0.0, done=True))

    def _look_at_supervisor(self) -> None:
        supervisor = os.getppid()
        stopped = hang.is_stopped(supervisor)
        if stopped and not self._supervisor_stopped:
            logger.warning(
                "the supervisor (process %d) is stopped by a signal: training goes on, but until it goes on "
                "too (kill -CONT %d), no rank that hangs or dies is noticed, and it passes no signal on",
                *(supervisor, supervisor),
            )
        self._supervisor_stopped = stopped

    def _watch_alone(self) -> None:
        while self._wait():
            still = self._still()
            if still > self.seconds:
                self._end_run(find_culprit({0: self._pulse(still)}, {}))

    def _watch(self) -> None:
        store = self._connect()
        while self._wait():
            try:
                self._look(store)
                self._answered = time.monotonic()
            except (RuntimeError, OSError) as error:
                # The store lives in rank 0 (or its agent); without it nobody can be asked.
                if self._still() > self.seconds:
                    self._end_run(Finding(0, f"{_store_server()} does not answer ({error})"))
        try:
            store.set(str(self._run.dist.rank), json.dumps(asdict(Pulse(self._beat + 1, 0.0, done=True))))
        except (RuntimeError, OSError):
            logger.debug("the store was gone before the hang watch ended")

    def _watch_store(self) -> None:
        """End the run when it stands still and the store, in which `_watch` may wait for ever, does too."""
        while self._wait():
            still, silence = self._still(), time.monotonic() - self._answered
            # The other watch decides where the store answers.
            if still > self.seconds + self.period and silence > longest_silence(self.seconds, self.period):
                symptom = f"{_store_server()} has not answered for {silence:.0f} s (stopped or cut off)"
                self._end_run(Finding(0, f"{symptom}; all others wait for it"), everywhere=True)

    def _connect(self) -> Any:
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
        pulse = self._pulse(still)
        store.set(str(rank), json.dumps(asdict(pulse)))
        if store.check(["verdict"]):
            if not self._end.is_set():
                hang.kill_stopped_children()
                os._exit(_EXIT_PROBLEMS)
            return
        now = time.monotonic()
        pulses: dict[int, Pulse | None] = {rank: pulse}
        silent: dict[int, float] = {}
        for other in range(world):
            if other == rank:
                continue
            message = store.get(str(other)).decode() if store.check([str(other)]) else ""
            before, since = self._heard.get(other, ("-", now))
            if message != before:
                since = now
                self._heard[other] = (message, now)
            pulses[other] = hang.read_pulse(message) if message else None
            if now - since > longest_silence(self.seconds, self.period) and not (pulses[other] or pulse).done:
                silent[other] = now - since
        if still > self.seconds and store.add("claim", 1) == 1:
            finding = find_culprit(pulses, silent)
            store.set("verdict", str(finding.rank))
            self._end_run(finding)

    def _pulse(self, still: float) -> Pulse:
        self._beat += 1
        short = Pulse(self._beat, still, step=self._run.iteration, limit=self.seconds, period=self.period)
        if still < self.seconds / 4:
            return short
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame) if frame is not None else traceback.StackSummary()
        if not stack:
            return short
        inner = stack[-1]
        place = f"{inner.name} ({inner.filename}:{inner.lineno})"
        doing = self._run.context.doing
        if doing:
            place += f" in {doing}"
        return replace(
            short,
            waits="torch/distributed" in inner.filename or bool(_WAITS.search(inner.line or "")),
            place=place,
            stack="".join(traceback.format_list(stack[-_FRAMES:])),
            note=hang.stopped_children(),
        )

    def _end_run(self, finding: Finding, *, everywhere: bool = False) -> None:
        """End this process with a message; not all ranks speak where each decides so, ``everywhere``."""
        if self._end.is_set():
            return
        info = self._run.dist
        if not everywhere or info.local_rank == 0 or info.local_rank == info.rank:
            said = [hang.message(finding, self.seconds, self._run.iteration), self._last_words()]
            say("\n".join(filter(None, said)))
        hang.kill_stopped_children()
        os._exit(_EXIT_PROBLEMS)


def _store_server() -> str:
    return "the launcher, which serves the store," if is_agent_store() else "rank 0, which serves the store,"


def watch(run: Run, last_words: Callable[[], str] = str) -> HangWatch:
    """Make the watch that the arguments ask for."""
    minutes = run.args.hang_timeout_minutes
    return HangWatch(run, 0.0 if minutes == 0 else seconds_to_hang(run.args), last_words)


def seconds_to_hang(args: Namespace) -> float:
    """Return the seconds without progress after which something hangs; the default where no watch is kept."""
    given = args.hang_timeout_minutes
    return 60.0 * float(given or SHARE_OF_COLLECTIVE_TIMEOUT * args.distributed_timeout_minutes)
