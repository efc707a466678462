"""The log of a rank's communication: its calls in order, and totals of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from mindspeed_megatron.backend_contracts.rendezvous import MESSAGES
from mindspeed_megatron.backend_contracts.tensor_facts import is_gloo_group


@dataclass(frozen=True)
class Progress:
    """A point in this rank's execution, or the work between two of them.

    Attributes:
        seconds: host time; on a device, of launching rather than of execution.
        operators: operators that computed a tensor: no views, allocations or communication; 0 unless
            computation is counted.
        flops: floating-point operations of the matrix products, convolutions and attentions among them, as
            `mindspeed_megatron.instruments.work_counter` counts.
    """

    seconds: float
    operators: int = 0
    flops: int = 0


@dataclass
class Call:
    """One communication call of this rank.

    Attributes:
        operation: the function's name, ``all_reduce``.
        group: the process group's description (``TENSOR_MODEL_PARALLEL_GROUP``, ``cp.ring``), or its ranks.
        ranks: global ranks of the group.
        input_bytes: bytes of this rank's input; 0 for a receive.
        sent_bytes: bytes this rank puts on the wire with a ring or pairwise algorithm.
        asynchronous: called with ``async_op=True`` or immediate by nature.
        launched: where this rank was when it made the call.
        dtype: of the first tensor, ``bfloat16``; empty for a barrier.
        tensor_bytes: bytes of the tensors that are sent or received; as ``input_bytes``, but for a receive.
        peer: global rank of the other side of a send or receive, or of the root; None where all are alike.
        group_name: the name by which ``torch.distributed`` knows the group.
        waited: where it first waited for the result; of a synchronous call where it returned, None while
            nobody has waited.
        launch_event: place of the call among all launches and waits of this rank.
        wait_event: place of the first wait among them; None while nobody has waited.
        batch: number of the coalesced batch that holds the call; None outside of one.
        creates: it is the first of its communicator, which the backend makes now: of the group, or of the
            pair of ranks for messages outside of a batch.
    """

    operation: str
    group: str
    ranks: tuple[int, ...]
    input_bytes: int
    sent_bytes: float
    asynchronous: bool
    launched: Progress
    dtype: str = ""
    tensor_bytes: int = 0
    peer: int | None = None
    group_name: str = ""
    waited: Progress | None = None
    launch_event: int = 0
    wait_event: int | None = None
    batch: int | None = None
    creates: bool = False

    @property
    def communicator(self) -> tuple[str, int | None]:
        """Return what tells this rank's communicators apart: the group, and the peer of a single message."""
        alone = self.operation in MESSAGES and self.batch is None
        return self.group_name, self.peer if alone else None

    def __str__(self) -> str:
        """Return the call as other ranks of the group must make it: group, operation, bytes, dtype, peer."""
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.group}: {self.operation} of {self.tensor_bytes:,} B {self.dtype}{peer}"

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of the tensor that all ranks have together, a gathered result for instance."""
        return self.input_bytes * (len(self.ranks) if self.operation.startswith("all_gather") else 1)

    @property
    def meanwhile(self) -> Progress | None:
        """Return the work of this rank between launch and wait; None while nobody has waited."""
        if self.waited is None:
            return None
        a, b = self.launched, self.waited
        return Progress(b.seconds - a.seconds, b.operators - a.operators, b.flops - a.flops)


class CommunicationListener(Protocol):
    """Hears of the calls of this rank and of its waits: in a synchronous call, or for an asynchronous one."""

    def call_made(self, call: Call) -> None:
        """Hear that the rank calls."""

    def wait_started(self, call: Call) -> None:
        """Hear that the rank begins to wait; on a device its stream does."""

    def wait_stopped(self, call: Call) -> None:
        """Hear that the result is there, or that the stream goes on when it is."""


@dataclass(frozen=True)
class Total:
    """The calls of one operation in one group, added up."""

    calls: int
    input_bytes: int
    sent_bytes: float


@dataclass(frozen=True)
class GroupRecord:
    """A process group that was made, this rank being a member or not.

    Attributes:
        description: as in `Call`.
        ranks: global ranks of its members.
        name: the name by which ``torch.distributed`` knows it; empty where this rank is no member.
    """

    description: str
    ranks: tuple[int, ...]
    name: str


@dataclass
class CommunicationLog:
    """The communication calls of a rank, in order.

    Attributes:
        groups: the process groups made meanwhile, in order.
    """

    calls: list[Call] = field(default_factory=list)
    groups: list[GroupRecord] = field(default_factory=list)
    _paused: int = 0

    def largest_temporary(self, temporaries: Mapping[str, float]) -> tuple[float, Call | None]:
        """Return the most bytes that a backend takes for itself during a call, and that call.

        Args:
            temporaries: `mindspeed_core.platforms.platform.Platform.backend_temporaries`.
        """
        sizes = [
            (temporaries[call.operation] * call.whole_bytes, number)
            for number, call in enumerate(self.calls)
            if call.operation in temporaries
        ]
        if not sizes:
            return 0.0, None
        most = max(size for size, _ in sizes)
        return most, next(self.calls[number] for size, number in sizes if size == most)

    def communicators(self) -> tuple[int, int]:
        """Return how many communicators a device backend makes for these calls: of groups, and of pairs.

        Messages outside of a batch have one for each pair of ranks; groups of one rank communicate nothing.
        """
        made = {
            call.communicator for call in self.calls if len(call.ranks) > 1 and not is_gloo_group(call.group)
        }
        pairs = sum(peer is not None for _, peer in made)
        return len(made) - pairs, pairs

    def made_late(self) -> list[tuple[Call, Call]]:
        """Return calls that make a group's communicator while a collective of this rank is under way.

        All ranks of the group meet there, on the host, and nothing of theirs goes on meanwhile: what was to
        be hidden behind the collective waits for it. Pairs of ranks, which pipeline stages make one by one,
        do not count.

        Returns:
            Each such call, with the collective that was under way.
        """
        under_way: list[Call] = []
        found = []
        for call in self.calls:
            if len(call.ranks) == 1 or is_gloo_group(call.group) or call.operation in MESSAGES:
                continue
            at = call.launch_event
            under_way = [one for one in under_way if one.wait_event is None or one.wait_event > at]
            if call.creates and under_way:
                found.append((call, under_way[0]))
            if call.asynchronous:
                under_way.append(call)
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record inside the context: what the measurement itself communicates."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def select(self, operation: str = "", group: str = "") -> list[Call]:
        """Return the calls of one operation and group; empty means any."""
        return [
            call
            for call in self.calls
            if (not operation or call.operation == operation) and (not group or call.group == group)
        ]

    def count(self, operation: str = "", group: str = "") -> int:
        """Count the calls."""
        return len(self.select(operation, group))

    def input_bytes(self, operation: str = "", group: str = "") -> int:
        """Return the bytes of this rank's inputs."""
        return sum(call.input_bytes for call in self.select(operation, group))

    def sent_bytes(self, operation: str = "", group: str = "") -> float:
        """Return the bytes this rank sends."""
        return sum(call.sent_bytes for call in self.select(operation, group))

    def table(self) -> dict[tuple[str, str], Total]:
        """Return totals by operation and group."""
        keys = sorted({(call.operation, call.group) for call in self.calls})
        return {key: Total(self.count(*key), self.input_bytes(*key), self.sent_bytes(*key)) for key in keys}
