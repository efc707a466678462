"""Order of communication: ranks of a group make the same calls in the same order, sends meet receives.

Two ranks compare the collectives of all groups that hold both of them, in one sequence: the groups a rank is
in share its time, so that a swapped pair of collectives of two groups blocks as surely as one of a single
group. Messages are compared by sender and receiver, each direction in its own order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from mindspeed_megatron.backend_contracts.rendezvous import MESSAGES, Stuck, Timed, stuck_ranks

if TYPE_CHECKING:
    from mindspeed_megatron.instruments.communication import Call


class Ranks(Protocol):
    """Global ranks of a group: equal to those of the same group, however they are held."""

    def __contains__(self, rank: object, /) -> bool:
        """Return whether a rank is a member."""
        ...

    def __iter__(self) -> Iterator[int]:
        """Return the members, in order."""
        ...


class Made(Timed, Protocol):
    """The part of a recorded call that instruments and plans keep alike."""

    @property
    def dtype(self) -> str:
        """Return the dtype of the first tensor."""


POINT_TO_POINT = MESSAGES
"""Operations between two ranks."""
SENDS = frozenset({"send", "isend"})
_UNEVEN = frozenset({"all_to_all", "all_to_all_single", "gather", "scatter", "barrier"})
"""Operations whose input may differ between ranks."""


@dataclass(frozen=True)
class OrderedCall:
    """A call as the other ranks of its group must make it.

    Attributes:
        group: description of the group.
        ranks: its members.
        operation: ``all_reduce``, ``isend``.
        bytes: of this rank's input; of a receive, of the tensor that is received.
        dtype: of the tensor.
        peer: global rank of the other side of a send or receive, or of the root; None where all are alike.
        launch_event: place of the launch among all launches and waits of this rank.
        wait_event: place of the first wait among them; None without one.
        batch: number of the coalesced batch that holds the call; None outside of one.
        creates: it is the first of its communicator, which is made by it.
    """

    group: str
    ranks: Ranks
    operation: str
    bytes: int
    dtype: str
    peer: int | None = None
    launch_event: int = field(default=0, compare=False)
    wait_event: int | None = field(default=None, compare=False)
    batch: int | None = field(default=None, compare=False)
    creates: bool = field(default=False, compare=False)

    @classmethod
    def made(cls, call: Made, group: str, ranks: Ranks, size: int) -> OrderedCall:
        """Return a recorded call as other ranks must make it.

        Args:
            call: as an instrument or a plan keeps it.
            group: description of the group.
            ranks: its members.
            size: bytes of this rank's input; of a receive, of the tensor that is received.
        """
        times = call.launch_event, call.wait_event, call.batch, call.creates
        return cls(group, ranks, call.operation, size, call.dtype, call.peer, *times)

    @classmethod
    def of(cls, call: Call) -> OrderedCall:
        """Return a call of a communication log as other ranks must make it."""
        return cls.made(call, call.group, call.ranks, call.tensor_bytes)

    def __str__(self) -> str:
        """Return group, operation, bytes, dtype and peer."""
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.group}: {self.operation} of {self.bytes:,} B {self.dtype}{peer}"


@dataclass(frozen=True)
class Disagreement:
    """Two ranks that would wait for each other, or exchange something else than they think.

    Attributes:
        group: name of the group.
        ranks: the two ranks; of a message sender and receiver.
        index: of the call among those compared, from 0.
        places: of the call among all calls of either rank; None where its calls have ended.
    """

    group: str
    ranks: tuple[int, int]
    index: int
    places: tuple[int | None, int | None]


def compare_order(
    a: int, a_calls: Sequence[OrderedCall], b: int, b_calls: Sequence[OrderedCall]
) -> tuple[int, Disagreement | None]:
    """Return how many calls two ranks share, and the first in which they differ.

    Args:
        a: a rank.
        a_calls: its calls, in order.
        b: another one.
        b_calls: likewise.
    """
    own, theirs = _collectives(a_calls, b), _collectives(b_calls, a)
    for index in range(max(len(own), len(theirs))):
        one, other = _at(own, index), _at(theirs, index)
        if one is None or other is None or _shared(a_calls[one]) != _shared(b_calls[other]):
            group = a_calls[one].group if one is not None else b_calls[other or 0].group
            return index, Disagreement(group, (a, b), index, (one, other))
    counted = len(own)
    for sender, sent, receiver, received in ((a, a_calls, b, b_calls), (b, b_calls, a, a_calls)):
        further, found = _compare_messages(sender, sent, receiver, received)
        counted += further
        if found is not None:
            return counted, found
    return counted, None


def disagreements(calls: Sequence[Sequence[OrderedCall]]) -> list[str]:
    """Return what blocks a world, a line for each two ranks that differ.

    Args:
        calls: of every rank, in order.
    """
    found = []
    for b, theirs in enumerate(calls):
        for a, own in enumerate(calls[:b]):
            _, one = compare_order(a, own, b, theirs)
            if one is None:
                continue
            said = [
                f"rank {rank}: {calls[rank][place] if place is not None else 'no further call'}"
                for rank, place in zip(one.ranks, one.places)
            ]
            found.append(f"order of calls, {one.group}, call {one.index}: {', '.join(said)}")
    return found


def waiting_for_ever(calls: Mapping[int, Sequence[OrderedCall]]) -> list[str]:
    """Return ranks that NCCL and HCCL would never let go on, a line each; gloo may well do so.

    Args:
        calls: of each known rank, with the places of launches and waits.
    """
    return [
        f"rank {one.rank} waits for ever for call {one.waits_for} ({calls[one.rank][one.waits_for]}), "
        f"behind call {one.behind} ({calls[one.rank][one.behind]}): {rule}"
        for one, rule in stuck_with_rule(calls)
    ]


def stuck_with_rule(calls: Mapping[int, Sequence[OrderedCall]]) -> list[tuple[Stuck, str]]:
    """Return ranks that NCCL and HCCL would never let go on, each with the rule that holds it.

    Args:
        calls: of each known rank, with the places of launches and waits.
    """
    found = stuck_ranks(calls)
    if not found:
        return [(one, _OF_DEVICES) for one in stuck_ranks(calls, one_device=True)]
    return [(one, _OF_CREATION if _is_creation(calls, one) else _OF_STREAMS) for one in found]


def _is_creation(calls: Mapping[int, Sequence[OrderedCall]], one: Stuck) -> bool:
    return one.launching and calls[one.rank][one.waits_for].creates


_OF_STREAMS = (
    "calls of a stream end in the order in which both sides made them, a send when its receive is reached"
)
_OF_CREATION = "the first call of a communicator makes it, and waits on the host for all its ranks"
_OF_DEVICES = "collectives of groups that share a device begin in one order on all ranks"


def _compare_messages(
    sender: int, sent: Sequence[OrderedCall], receiver: int, received: Sequence[OrderedCall]
) -> tuple[int, Disagreement | None]:
    """Compare what a rank sends to another one with what that one receives."""
    out = [n for n, call in enumerate(sent) if call.operation in SENDS and call.peer == receiver]
    come = [
        n
        for n, call in enumerate(received)
        if call.operation in POINT_TO_POINT - SENDS and call.peer == sender
    ]
    for index in range(max(len(out), len(come))):
        one, other = _at(out, index), _at(come, index)
        if one is None or other is None or _content(sent[one]) != _content(received[other]):
            group = sent[one].group if one is not None else received[other or 0].group
            return index, Disagreement(group, (sender, receiver), index, (one, other))
    return len(out), None


def _collectives(calls: Sequence[OrderedCall], other: int) -> list[int]:
    """Return the places of the collectives of all groups that hold ``other`` too."""
    return [n for n, call in enumerate(calls) if call.operation not in POINT_TO_POINT and other in call.ranks]


def _at(places: Sequence[int], index: int) -> int | None:
    return places[index] if index < len(places) else None


def _shared(call: OrderedCall) -> tuple[object, ...]:
    # Uneven inputs are what gathers, scatters and all-to-alls are for; there the operation has to agree.
    size = None if call.operation in _UNEVEN else call.bytes
    return call.group, call.ranks, call.operation, size, call.dtype


def _content(call: OrderedCall) -> tuple[object, ...]:
    return call.bytes, call.dtype
