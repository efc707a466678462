"""Order of calls as NCCL and HCCL serve it: streams that work one call after the other, and calls that meet.

Collectives of a group, and batches of messages in it, share one stream; messages that are sent and received
one by one share a stream for each pair of ranks in the group, both directions together. A stream begins a
call when it has ended the one before, and a call ends when every rank that takes part has reached it: a send
waits for its receive. Gloo matches messages in any order, so that what waits for ever here runs there.

The first call of a group, or of a pair of ranks, makes their communicator: the host of each of them waits
until all of them have come to it. And the collectives of all groups that share a device begin in one order:
kernels of a communicator hold the device until their peers run too (`stuck_ranks` with ``one_device``).

The rules are those of torch's ``ProcessGroupNCCL`` and torch_npu's ``ProcessGroupHCCL``, which make a
communicator of two ranks for messages outside of a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mindspeed_megatron.backend_contracts.tensor_facts import is_gloo_group

_SENDS = frozenset({"send", "isend"})
MESSAGES = _SENDS | {"recv", "irecv"}
"""Operations between two ranks."""


class Timed(Protocol):
    """A call of a rank with the places of its launch and of its first wait among all of them."""

    @property
    def operation(self) -> str:
        """Return the name of the function."""

    @property
    def peer(self) -> int | None:
        """Return the global rank of the other side of a message."""

    @property
    def launch_event(self) -> int:
        """Return the place of the launch."""

    @property
    def wait_event(self) -> int | None:
        """Return the place of the first wait; None without one."""

    @property
    def batch(self) -> int | None:
        """Return the number of the batch that holds a message; None outside of one."""

    @property
    def creates(self) -> bool:
        """Return whether the communicator is made by this call."""


class Launched(Timed, Protocol):
    """Such a call, and its group."""

    @property
    def group(self) -> str:
        """Return the description of the group."""

    @property
    def ranks(self) -> Iterable[int]:
        """Return the global ranks of the group."""


@dataclass(frozen=True)
class Stuck:
    """A rank that waits for ever.

    Attributes:
        rank: which.
        waits_for: index of the call that it waits for.
        behind: index of the call that its stream is held by, which is often the same.
        launching: it waits on the host for others to make the call's communicator.
    """

    rank: int
    waits_for: int
    behind: int
    launching: bool = False


@dataclass
class _Item:
    """An entry of a stream: a call, or the calls of a batch."""

    calls: list[int]
    done: set[int] = field(default_factory=set)


def stuck_ranks(calls: Mapping[int, Sequence[Launched]], *, one_device: bool = False) -> tuple[Stuck, ...]:
    """Play the calls of ranks; return those that never come to the end of theirs.

    Args:
        calls: of each known rank, in the order of their launches. A rank that is not known is taken to meet
            every call.
        one_device: let the collectives of all groups of a rank follow each other, as where a kernel that
            waits for its peers leaves no room for another one.
    """
    return _Game(calls, one_device).play()


class _Game:
    """One play of the calls of ranks."""

    def __init__(self, calls: Mapping[int, Sequence[Launched]], one_device: bool) -> None:
        self.calls, self.one_device = calls, one_device
        self.makers = _makers(calls)
        self.arrived: set[tuple[int, int]] = set()
        self.events = {rank: _events(mine) for rank, mine in calls.items()}
        self.at = dict.fromkeys(calls, 0)
        self.streams: dict[int, dict[Hashable, deque[_Item]]] = {rank: {} for rank in calls}
        self.done: dict[int, set[int]] = {rank: set() for rank in calls}
        self.batches: dict[tuple[int, int], _Item] = {}

    def play(self) -> tuple[Stuck, ...]:
        moved = True
        while moved:
            moved = False
            for rank in self.calls:
                while self._step(rank):
                    moved = True
            for rank, streams in self.streams.items():
                for key in list(streams):
                    while self._serve(rank, key):
                        moved = True
        return tuple(self._stuck(rank) for rank in self.calls if self.at[rank] < len(self.events[rank]))

    def _step(self, rank: int) -> bool:
        """Launch or wait, unless the rank has ended or its wait is not over."""
        if self.at[rank] == len(self.events[rank]):
            return False
        launch, index = self.events[rank][self.at[rank]]
        if launch:
            if not self._created(rank, index):
                return False
            self._launch(rank, index)
        elif index not in self.done[rank]:
            return False
        self.at[rank] += 1
        return True

    def _created(self, rank: int, index: int) -> bool:
        """Return whether all ranks of a communicator that this call makes have come to it."""
        key = _stream(rank, self.calls[rank][index])
        if (rank, index) not in self.makers.get(key, ()):
            return True
        self.arrived.add((rank, index))
        return self.makers[key] <= self.arrived

    def _queue(self, rank: int, call: Launched) -> Hashable:
        """Return the queue of a call: its stream, or the device's where all collectives share one."""
        shared = self.one_device and call.operation not in MESSAGES and not is_gloo_group(call.group)
        return "device" if shared else _stream(rank, call)

    def _launch(self, rank: int, index: int) -> None:
        call = self.calls[rank][index]
        queue = self.streams[rank].setdefault(self._queue(rank, call), deque())
        if call.batch is None:
            queue.append(_Item([index]))
            return
        item = self.batches.get((rank, call.batch))
        if item is None:
            item = self.batches[rank, call.batch] = _Item([])
            # A batch is posted as a whole: it begins when its last message is known.
            item.calls = [n for n, one in enumerate(self.calls[rank]) if one.batch == call.batch]
            queue.append(item)

    def _serve(self, rank: int, key: Hashable) -> bool:
        """End what stands first in a stream of a rank, as far as it meets its counterparts."""
        queue = self.streams[rank][key]
        if not queue:
            return False
        item, moved = queue[0], False
        for index in item.calls:
            if index not in item.done and self._meets(rank, key, index):
                moved = True
        return moved

    def _meets(self, rank: int, key: Hashable, index: int) -> bool:
        call = self.calls[rank][index]
        if call.operation not in MESSAGES:
            heads: dict[int, int] = {}
            # Collectives of a batch meet those of the other ranks' batches one by one, in order.
            for one in (rank, *(other for other in call.ranks if other in self.calls and other != rank)):
                head = self._head(one, key)
                first = None if head is None else next(n for n in head.calls if n not in head.done)
                if first is None or not self._same_group(call, self.calls[one][first]):
                    return False
                heads[one] = first
            if heads[rank] != index:
                return False
            for one, found in heads.items():
                self._end(one, key, found)
            return True
        peer = call.peer
        if peer is None or peer not in self.calls:
            self._end(rank, key, index)
            return True
        head = self._head(peer, key)
        if head is None:
            return False
        wanted = MESSAGES - _SENDS if call.operation in _SENDS else _SENDS
        for found in head.calls:
            counterpart = self.calls[peer][found]
            fits = counterpart.peer == rank and counterpart.operation in wanted
            if found not in head.done and fits:
                # A rank that sends to itself meets itself.
                self._end(peer, key, found)
                self._end(rank, key, index)
                return True
        return False

    def _same_group(self, call: Launched, other: Launched) -> bool:
        """Return whether two collectives meet; in a group's own stream only messages do not."""
        if other.operation in MESSAGES:
            return False
        return (call.group, tuple(call.ranks)) == (other.group, tuple(other.ranks))

    def _head(self, rank: int, key: Hashable) -> _Item | None:
        queue = self.streams[rank].get(key)
        return queue[0] if queue else None

    def _end(self, rank: int, key: Hashable, index: int) -> None:
        queue = self.streams[rank][key]
        item = queue[0]
        item.done.add(index)
        self.done[rank].add(index)
        if len(item.done) == len(item.calls):
            queue.popleft()

    def _stuck(self, rank: int) -> Stuck:
        launching, index = self.events[rank][self.at[rank]]
        call = self.calls[rank][index]
        head = self._head(rank, self._queue(rank, call))
        behind = next((n for n in head.calls if n not in head.done), index) if head else index
        return Stuck(rank, index, index if launching else behind, launching)


def _makers(calls: Mapping[int, Sequence[Launched]]) -> dict[Hashable, set[tuple[int, int]]]:
    """Return the calls, by rank and index, that make each communicator; of the known ranks that make it."""
    found: dict[Hashable, set[tuple[int, int]]] = {}
    for rank, mine in calls.items():
        for index, call in enumerate(mine):
            if call.creates:
                found.setdefault(_stream(rank, call), set()).add((rank, index))
    return found


def _events(calls: Sequence[Launched]) -> list[tuple[bool, int]]:
    """Return launches and waits in the order in which they happened, as (is launch, index of the call)."""
    found = [(call.launch_event, True, index) for index, call in enumerate(calls)]
    found += [
        (call.wait_event, False, index) for index, call in enumerate(calls) if call.wait_event is not None
    ]
    return [(launch, index) for _, launch, index in sorted(found, key=lambda event: (event[0], not event[1]))]


def _stream(rank: int, call: Launched) -> Hashable:
    if call.operation in MESSAGES and call.batch is None and call.peer is not None:
        return call.group, tuple(call.ranks), frozenset({rank, call.peer})
    return call.group, tuple(call.ranks)
