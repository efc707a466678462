"""Order check of a plan: all pairs of recorded ranks that share a group, with the code of what differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from mindspeed_megatron.instruments.call_order import OrderedCall, compare_order, stuck_with_rule
from mindspeed_tune.record import Call, RankRecord


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
        waiting: a paragraph for each rank that NCCL and HCCL would never let go on.
    """

    differences: tuple[Difference, ...]
    pairs: int
    compared: int
    unchecked: tuple[str, ...]
    waiting: tuple[str, ...] = ()


def shown(call: Call | None) -> str:
    """Return a call as a reader wants it."""
    if call is None:
        return "no further call"
    with_whom = "" if call.peer is None else f" with rank {call.peer}"
    return f"{call.operation}{with_whom} of {call.bytes:,} bytes {call.dtype}, {call.phase or 'any phase'}"


def check_order(records: Sequence[RankRecord]) -> OrderCheck:
    """Compare all pairs of recorded ranks that share a group.

    Layers that only one of two pipeline stages has repeat calls in groups of that stage alone, so that both
    sides count the same groups even where they ran other layers.
    """
    differences: list[Difference] = []
    pairs = compared = 0
    calls = {record.rank: _ordered(record) for record in records}
    for a, b in combinations(sorted(records, key=lambda record: record.rank), 2):
        if a.runs[0].microbatches != b.runs[0].microbatches:
            continue
        counted, found = compare_order(a.rank, calls[a.rank], b.rank, calls[b.rank])
        if counted:
            pairs, compared = pairs + 1, compared + counted
        if found is not None:
            by_rank = {a.rank: a.calls, b.rank: b.calls}
            one, other = (
                None if place is None else by_rank[rank][place]
                for rank, place in zip(found.ranks, found.places)
            )
            differences.append(Difference(found.group, found.ranks, found.index, (one, other)))
    # Ranks that differ wait for each other anyway.
    waiting = () if differences else tuple(_waiting(records, calls))
    return OrderCheck(tuple(differences), pairs, compared, tuple(_unchecked(records)), waiting)


def _waiting(records: Sequence[RankRecord], calls: Mapping[int, Sequence[OrderedCall]]) -> Iterator[str]:
    """Yield a paragraph for each rank that waits for ever, with the code of its call.

    Ranks that ran other numbers of micro-batches than the first one are left out, as if they met every call.
    """
    alike = [one for one in records if one.runs[0].microbatches == records[0].runs[0].microbatches]
    by_rank = {one.rank: one.calls for one in alike}
    for stuck, rule in stuck_with_rule({one.rank: calls[one.rank] for one in alike}):
        call, behind = (by_rank[stuck.rank][place] for place in (stuck.waits_for, stuck.behind))
        group = calls[stuck.rank][stuck.waits_for].group
        lines = [f"{group}: rank {stuck.rank} waits for ever for {shown(call)}"]
        if behind is not call:
            lines.append(f"  behind {shown(behind)}")
        lines += [f"    {line}" for line in call.stack[:3]]
        lines.append(f"  with NCCL and HCCL {rule}")
        yield "\n".join(lines)


def _ordered(record: RankRecord) -> list[OrderedCall]:
    groups = [record.groups[call.group] for call in record.calls]
    return [
        OrderedCall.made(call, group.name, group.ranks, call.bytes)
        for call, group in zip(record.calls, groups)
    ]


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
