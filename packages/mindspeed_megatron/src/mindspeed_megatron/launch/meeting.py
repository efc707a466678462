"""Meeting of all ranks before the process group starts, so that who is missing can be named.

torch.distributed waits for ranks without knowing who came. Here every rank writes into the shared store who
and where it is; rank 0 compares and answers each of them. Only calls that return at once are used: those of
the store that wait print c10d's own text when they give up.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import LostPeerError, UserError
from mindspeed_megatron.launch.environment import Assignment, current_assignment, current_job
from mindspeed_megatron.launch.store import Limit, is_agent_store, open_store

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger("mindspeed_core")

TIMEOUT = timedelta(minutes=10)
"""As of ``--distributed-timeout-minutes``."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25
_LEAVE_SECONDS = 5.0
_FIRST_WORD_SECONDS = 30.0
_SHOWN_HOSTS = 16
_processes: dict[int, str] = {}


class MeetingError(UserError):
    """World that did not come together; the message names the ranks that came and those that did not.

    Attributes:
        told_by_rank_zero: rank 0 raises the same error.
    """

    def __init__(self, message: str, *, told_by_rank_zero: bool = False) -> None:
        """Keep the message, and whether rank 0 has it too."""
        super().__init__(message)
        self.told_by_rank_zero = told_by_rank_zero


@dataclass(frozen=True)
class Meeting:
    """The world that came together.

    Attributes:
        store: seen by the ranks of this meeting alone; for ``init_process_group(store=...)``.
        rank: of this process.
        world_size: all ranks.
    """

    store: Store
    rank: int
    world_size: int


@dataclass(frozen=True)
class _Arrival:
    """One process that came, as the others see it."""

    token: str
    process: str
    rank: int
    world_size: int
    host: str
    pid: int
    job: str = ""

    @property
    def place(self) -> str:
        return f"host {self.host}, process {self.pid}"


def meet_ranks(timeout: timedelta = TIMEOUT, *, flag: str = "timeout") -> Meeting:
    """Wait until every rank of the launcher's world is here; call it before ``init_process_group``.

    The world is that of ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, which torchrun and
    ``mindspeed-train --nproc`` set. Collective over all its ranks. ``init_process_group()`` without arguments
    works afterwards too: rank 0 goes on serving the store at that address.

    Args:
        timeout: how long to wait for the other ranks.
        flag: what the caller's user sets the timeout with; for messages.

    Returns:
        The rank, the world size, and a store for the process group.

    Raises:
        MeetingError: a rank did not come in time, two have the same ``RANK``, ``WORLD_SIZE`` differs, or
            it was given up.
        LostPeerError: rank 0 or its launcher ended meanwhile.
        UserError: nobody serves the store, a variable is absent or no number, or the port is taken.
    """
    import torch.distributed as dist

    own = current_assignment()
    limit = Limit(timeout, flag)
    store: Any = open_store(own, limit)
    # One place for all attempts: agents of torchrun count restarts each for itself.
    hall: Any = dist.PrefixStore("mindspeed/meeting", store)
    try:
        token = (_Judge if own.rank == 0 else _Member)(hall, own, limit).meet()
    except RuntimeError as error:
        raise LostPeerError(
            f"rank {own.rank} of {own.world_size} (host {_host()}) lost the connection to "
            f"{own.meeting_place} before all ranks had met: rank 0 or its launcher ended; look at the first "
            "error in their output"
        ) from error
    return Meeting(dist.PrefixStore(f"mindspeed/{token}", store), own.rank, own.world_size)


@dataclass
class _Rank:
    """One rank at the meeting: `meet` returns the name of the world that came together."""

    hall: Any
    own: Assignment
    limit: Limit
    seen: dict[str, _Arrival] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    read: int = 0
    pause: float = _SHORTEST_PAUSE

    def arrive(self) -> None:
        process = _processes.setdefault(os.getpid(), uuid.uuid4().hex)
        own = self.own
        self.arrival = _Arrival(
            uuid.uuid4().hex, process, own.rank, own.world_size, _host(), os.getpid(), current_job().name
        )
        self._refuse_if_complete()
        number = self.hall.add("arrivals", 1)
        self.hall.set(f"arrival/{number}", json.dumps(asdict(self.arrival)))
        self.since = time.monotonic()
        self.deadline = self.since + self.limit.seconds

    def rest(self) -> bool:
        """Wait a moment, a longer one each time; False when the time is up."""
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, _LONGEST_PAUSE)
        return time.monotonic() < self.deadline

    def look(self) -> list[_Arrival]:
        """Return the processes that came since the last look."""
        new = []
        while self.hall.check([f"arrival/{self.read + 1}"]):
            self.read += 1
            written = json.loads(self.hall.get(f"arrival/{self.read}"))
            arrival = _Arrival(**{one.name: written[one.name] for one in fields(_Arrival)})
            self.seen[arrival.token] = arrival
            new.append(arrival)
        return new

    def received(self, kind: str) -> Any:
        key = f"{kind}/{self.arrival.token}"
        return json.loads(self.hall.get(key)) if self.hall.check([key]) else None

    def answer_call(self) -> bool:
        """Answer whoever calls this rank; return whether somebody did for the first time."""
        call = self.received("call")
        if call is None or call in self.answered:
            return False
        self.answered.add(call)
        self.send(f"answer/{call}", self.arrival.token, True)
        return True

    def send(self, kind: str, token: str, value: Any) -> None:
        self.hall.set(f"{kind}/{token}", json.dumps(value))

    def leave(self) -> None:
        """Tell who decided that its verdict is read; who waited too long for that may be gone."""
        with suppress(RuntimeError):
            self.send("left", self.arrival.token, True)

    def _refuse_if_complete(self) -> None:
        # The store of a launcher that restarts workers remembers former worlds, and gives each rank once.
        if is_agent_store() or not self.hall.check(["complete"]):
            return
        if not self.hall.check([f"complete/{self.arrival.process}"]):
            own = self.own
            raise MeetingError(
                f"the {int(self.hall.get('complete'))} ranks that meet at {own.meeting_place} are complete "
                f"without this process, rank {own.rank} of {own.world_size} ({self.arrival.place}); give "
                "each process a RANK of its own, and each job a MASTER_PORT of its own"
            )


class _Member(_Rank):
    """A rank that waits for what rank 0 decides."""

    def meet(self) -> str:
        self.arrive()
        while self.rest():
            if self.answer_call():
                # Rank 0 may have come just now, and waits as long for the others.
                self.deadline = time.monotonic() + self.limit.seconds + _LEAVE_SECONDS
            verdict = self.received("verdict") if self.answered else None
            if verdict is not None:
                if "world" in verdict:
                    return str(verdict["world"])
                self.leave()
                raise MeetingError(verdict["problem"], told_by_rank_zero=verdict["shared"])
        self.look()
        others = [arrival for arrival in self.seen.values() if arrival.rank]
        raise MeetingError(
            f"rank 0 of {self.own.world_size} did not come to {self.own.meeting_place} within {self.limit}, "
            f"while {_by_host(others)} did; {_WAY_OUT}"
        )


_WAY_OUT = (
    "look at the first error in the output of what is missing, and start all nodes with the same "
    "MASTER_ADDR, MASTER_PORT and WORLD_SIZE (torchrun: --nnodes, --nproc-per-node) and each process with a "
    "RANK of its own (torchrun: --node-rank)"
)


class _Judge(_Rank):
    """Rank 0: calls everybody who comes, and decides when all have answered or the time is up.

    What does not answer is a process that ended: a launcher's store remembers workers of former attempts.
    """

    def meet(self) -> str:
        self.arrive()
        self.present: dict[str, _Arrival] = {}
        self.waits: dict[str, _Arrival] = {}
        word = _FIRST_WORD_SECONDS
        while True:
            self._call_and_listen()
            problem = self._problem()
            if problem:
                self._refuse(problem)
            if len(self.present) == self.own.world_size:
                return self._complete()
            waited = time.monotonic() - self.since
            if waited > word:
                word *= 2
                logger.warning(
                    "%s, after %.0f s of %s", self._missing("have not come yet"), waited, self.limit
                )
            if not self.rest():
                missing = self._missing(f"did not come within {self.limit}")
                self._refuse(f"{missing}; {_WAY_OUT}")

    def _call_and_listen(self) -> None:
        for arrival in self.look():
            self.pause = _SHORTEST_PAUSE
            if arrival == self.arrival:
                self.present[arrival.token] = arrival
            else:
                self.waits[arrival.token] = arrival
                self.send("call", arrival.token, self.arrival.token)
        # Another process with RANK 0 may call this one.
        self.answer_call()
        calling = self.arrival.token
        for token in [token for token in self.waits if self.hall.check([f"answer/{calling}/{token}"])]:
            self.present[token] = self.waits.pop(token)
        verdict = self.received("verdict")
        if verdict is not None:
            self.leave()
            raise MeetingError(verdict["problem"])

    def _send_away(self, arrival: _Arrival) -> None:
        problem = (
            f"rank {arrival.rank} of {arrival.world_size} ({arrival.place}) came to "
            f"{self.own.meeting_place}, where another job meets, of {self.own.world_size} ranks "
            f"({self.arrival.place}); give each job a MASTER_PORT of its own"
        )
        del self.present[arrival.token]
        self.send("verdict", arrival.token, {"problem": problem, "shared": False})

    def _problem(self) -> str:
        own = self.own
        ranks: dict[int, _Arrival] = {}
        # A process of another job, where jobs have names, is sent away alone; this job goes on.
        for arrival in sorted(self.present.values(), key=lambda one: one.job != self.arrival.job):
            fits = arrival.world_size == own.world_size and arrival.rank not in ranks
            if not fits and arrival.job != self.arrival.job:
                self._send_away(arrival)
                continue
            if arrival.world_size != own.world_size:
                return (
                    f"rank {arrival.rank} ({arrival.place}) was started for WORLD_SIZE {arrival.world_size}, "
                    f"rank 0 ({self.arrival.place}) for {own.world_size}; start every node with the same "
                    "number of nodes and of processes on each (torchrun: --nnodes, --nproc-per-node)"
                )
            other = ranks.setdefault(arrival.rank, arrival)
            if other is not arrival:
                return (
                    f"two processes came to {own.meeting_place} as rank {arrival.rank} of {own.world_size}: "
                    f"{other.place}, and {arrival.place}; give each process a RANK of its own (torchrun: "
                    "each node its --node-rank)"
                )
        return ""

    def _missing(self, what: str) -> str:
        here = {arrival.rank for arrival in self.present.values()}
        absent = [rank for rank in range(self.own.world_size) if rank not in here]
        gone = [arrival for arrival in self.waits.values() if arrival.rank not in here]
        text = f"{_ranks(absent)} of {self.own.world_size} {what} at {self.own.meeting_place}"
        text += f", while {_by_host(self.present.values())} did"
        if gone and not is_agent_store():
            text += f" and {_by_host(gone)} came and ended"
        return text

    def _refuse(self, problem: str) -> None:
        """Tell everybody, and stay until they have read it: this process may serve the store."""
        for token in {**self.present, **self.waits}:
            if token != self.arrival.token:
                self.send("verdict", token, {"problem": problem, "shared": True})
        self.deadline = time.monotonic() + _LEAVE_SECONDS
        left = [f"left/{token}" for token in self.present if token != self.arrival.token]
        while left and not self.hall.check(left) and self.rest():
            continue
        raise MeetingError(problem)

    def _complete(self) -> str:
        world = uuid.uuid4().hex
        for arrival in self.present.values():
            self.hall.set(f"complete/{arrival.process}", "")
        self.hall.set("complete", str(self.own.world_size))
        for token in self.present:
            if token != self.arrival.token:
                self.send("verdict", token, {"world": world})
        return world


def _host() -> str:
    return socket.gethostname()


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0-2, 5``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
    return f"rank{'s' if len(parts) > 1 or parts[0][0] != parts[0][1] else ''} {text}"


def _by_host(arrivals: Iterable[_Arrival]) -> str:
    """Return ``ranks 0-3 (host a) and rank 4 (host b)``."""
    hosts: defaultdict[str, set[int]] = defaultdict(set)
    for arrival in arrivals:
        hosts[arrival.host].add(arrival.rank)
    parts = [
        f"{_ranks(ranks)} (host {host})" for host, ranks in sorted(hosts.items(), key=lambda h: min(h[1]))
    ]
    if len(parts) > _SHOWN_HOSTS:
        parts = [*parts[:_SHOWN_HOSTS], f"those of {len(parts) - _SHOWN_HOSTS} more hosts"]
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))
