"""Order check: ranks that share a group make the same calls in the same order, sends meet their receives.

Two ranks compare the calls of all groups that hold both of them, in one sequence: the groups a rank is in
share its time, so that a swapped pair of collectives of two groups blocks as surely as one of a single group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from mindspeed_tune.record import POINT_TO_POINT, SENDS, Call, Group, RankRecord


@dataclass(frozen=True)
class Difference:
    """Two ranks that would wait for each other, or exchange something else than they think.

    Attributes:
        group: name of the group.
        ranks: the two ranks.
        index: of the call among those compared, from 0.
        calls: what each calls there; None where its calls have ended.
    """

    group: str
    ranks: tuple[int, int]
    index: int
    calls: tuple[Call | None, Call | None]

    def __str__(self) -> str:
        """Return one paragraph that names group, call, ranks and code."""
        lines = [f"{self.group}: ranks {self.ranks[0]} and {self.ranks[1]} differ at call {self.index}"]
        for rank, call in zip(self.ranks, self.calls):
            lines.append(f"  rank {rank}: {shown(call)}")
            lines += [f"    {line}" for line in (call.stack if call is not None else ())[:3]]
        return "\n".join(lines)


@dataclass(frozen=True)
class OrderCheck:
    """The outcome of comparing ranks.

    Attributes:
        differences: the first one of every pair of ranks that differ.
        pairs: how many pairs were compared.
        compared: calls that were compared.
        unchecked: groups in which the ranks communicate, but of which one member was recorded only.
    """

    differences: tuple[Difference, ...]
    pairs: int
    compared: int
    unchecked: tuple[str, ...]


def shown(call: Call | None) -> str:
    """Return a call as a reader wants it."""
    if call is None:
        return "no further call"
    with_whom = "" if call.peer is None else f" with rank {call.peer}"
    return f"{call.operation}{with_whom} of {call.bytes:,} bytes {call.dtype}, {call.phase or 'any phase'}"


def check_order(records: Sequence[RankRecord]) -> OrderCheck:
    """Compare all pairs of recorded ranks that share a group."""
    differences: list[Difference] = []
    pairs = compared = 0
    for a, b in combinations(sorted(records, key=lambda record: record.rank), 2):
        if not _comparable(a, b):
            continue
        counted, found = _compare(a, b)
        if counted:
            pairs, compared = pairs + 1, compared + counted
        if found is not None:
            differences.append(found)
    return OrderCheck(tuple(differences), pairs, compared, tuple(_unchecked(records)))


def _comparable(a: RankRecord, b: RankRecord) -> bool:
    return a.runs[0].microbatches == b.runs[0].microbatches


def _compare(a: RankRecord, b: RankRecord) -> tuple[int, Difference | None]:
    """Return how many calls two ranks share, and their first difference."""
    counted, found = _compare_collectives(a, b)
    if found is None:
        further, found = _compare_messages(a, b)
        counted += further
    return counted, found


def _compare_collectives(a: RankRecord, b: RankRecord) -> tuple[int, Difference | None]:
    mine, theirs = list(_collectives(a, b.rank)), list(_collectives(b, a.rank))
    # Layers that only one of two pipeline stages has repeat calls in groups of that stage alone, so that
    # both sides count the same groups even where they ran other layers.
    for index in range(max(len(mine), len(theirs))):
        one = mine[index] if index < len(mine) else None
        other = theirs[index] if index < len(theirs) else None
        if one is None or other is None or _key(*one) != _key(*other):
            present = one or other
            assert present is not None
            calls = (one[1] if one else None, other[1] if other else None)
            return index, Difference(present[0].name, (a.rank, b.rank), index, calls)
    return len(mine), None


def _compare_messages(a: RankRecord, b: RankRecord) -> tuple[int, Difference | None]:
    """Compare what each of two ranks sends with what the other one receives."""
    counted = 0
    for sender, receiver in ((a, b), (b, a)):
        sent = [one for one in _messages(sender, receiver.rank) if one[1].operation in SENDS]
        received = [one for one in _messages(receiver, sender.rank) if one[1].operation not in SENDS]
        for index in range(max(len(sent), len(received))):
            out = sent[index] if index < len(sent) else None
            come = received[index] if index < len(received) else None
            same = out is not None and come is not None and _content(out[1]) == _content(come[1])
            if not same:
                present = out or come
                assert present is not None
                calls = (out[1] if out else None, come[1] if come else None)
                return counted, Difference(present[0].name, (sender.rank, receiver.rank), index, calls)
        counted += len(sent)
    return counted, None


def _collectives(record: RankRecord, other: int) -> Iterator[tuple[Group, Call]]:
    """Yield the collectives of all groups that hold ``other`` too."""
    shared = [other in group.ranks for group in record.groups]
    for call in record.calls:
        if shared[call.group] and call.operation not in POINT_TO_POINT:
            yield record.groups[call.group], call


def _messages(record: RankRecord, other: int) -> Iterator[tuple[Group, Call]]:
    for call in record.calls:
        if call.operation in POINT_TO_POINT and call.peer == other:
            yield record.groups[call.group], call


def _key(group: Group, call: Call) -> tuple[object, ...]:
    # Uneven inputs are what gathers, scatters and all-to-alls are for; there the operation has to agree.
    size = None if call.operation in _UNEVEN else call.bytes
    return group.name, group.ranks, call.operation, size, call.dtype


_UNEVEN = frozenset({"all_to_all", "all_to_all_single", "gather", "scatter", "barrier"})
"""Operations whose input may differ between ranks."""


def _content(call: Call) -> tuple[object, ...]:
    return call.bytes, call.dtype


def _unchecked(records: Sequence[RankRecord]) -> Iterator[str]:
    """Yield names of groups with calls in which no two recorded ranks ever met."""
    checked: set[str] = set()
    used: set[str] = set()
    for record in records:
        for index in {call.group for call in record.calls}:
            group = record.groups[index]
            if group.ranks.size == 1:
                continue
            used.add(group.name)
            if any(other.rank != record.rank and other.rank in group.ranks for other in records):
                checked.add(group.name)
    yield from sorted(used - checked)
