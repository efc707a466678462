"""Calls and bytes of communication of training steps, by process group and operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_core.runtime.metrics import Report
from mindspeed_megatron.instruments.communication import Call
from mindspeed_megatron.instruments.communication_events import CommunicationEvents

if TYPE_CHECKING:
    from mindspeed_core.session import Session

Counts = dict[tuple[str, str, str], float]
"""Numbers by group, operation and quantity."""
QUANTITIES = ("calls", "bytes", "sent_bytes")


class CommunicationCount:
    """Counts of this rank since the last report."""

    def __init__(self) -> None:
        """Begin with nothing counted."""
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._steps = 0

    @contextmanager
    def step(self, session: Session) -> Iterator[None]:
        """Count the calls of the body, which is one training step."""
        with session.state(CommunicationEvents).listening(self, session.at_close):
            yield
        self._steps += 1

    def call_made(self, call: Call) -> None:
        """Count a call; groups of one rank communicate nothing."""
        if len(call.ranks) > 1:
            for quantity, number in zip(QUANTITIES, (1, call.input_bytes, call.sent_bytes)):
                self._counts[call.group, call.operation, quantity] += number  # type: ignore[assignment]

    def wait_started(self, call: Call) -> None:
        """Take no notice."""

    def wait_stopped(self, call: Call) -> None:
        """Take no notice."""

    def report(self) -> Report:
        """Return the mean of a step since the last report; collective over all ranks.

        Returns:
            By group and operation ``calls``, ``bytes`` (of a rank's inputs) and ``sent_bytes`` (on the wire
            of a ring or pairwise algorithm), each of the rank that has most.
        """
        steps = max(1, self._steps)
        own = {key: number / steps for key, number in self._counts.items()}
        self._counts.clear()
        self._steps = 0
        most = largest(all_gather_values(own))
        values: dict[str, dict[str, dict[str, float]]] = {}
        for (group, operation, quantity), number in sorted(most.items()):
            values.setdefault(group, {}).setdefault(operation, {})[quantity] = _whole(number)
        return Report(values, lines(values))


def largest(ranks: Sequence[Mapping[tuple[str, str, str], float]]) -> Counts:
    """Return the largest of all ranks of each number."""
    found: Counts = {}
    for rank in ranks:
        for key, number in rank.items():
            found[key] = max(found.get(key, 0.0), number)
    return found


def lines(values: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return a line for each group and operation, under a heading."""
    if not values:
        return ["communication per step: none"]
    found = ["communication per step, of the rank with most:"]
    for group, operations in values.items():
        for operation, one in operations.items():
            found.append(
                f"    {group} {operation}: {one['calls']:,.6g} calls, {one['bytes']:,.0f} B given, "
                f"{one['sent_bytes']:,.0f} B sent"
            )
    return found


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
