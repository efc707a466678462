"""Lists of ranks in short form: ``start:stop:stride``, and repetitions of it.

A process group of a regular layout is an arithmetic progression, or a few nested ones. Groups of a hundred
thousand ranks so stay a few numbers in records and reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankList:
    """Ranks as nested progressions.

    Attributes:
        start: the first rank.
        steps: count and stride of every nesting, innermost first: ``((8, 1), (4, 128))`` stands for 8
            neighbouring ranks, 4 times, 128 apart.
        others: all ranks, where they are no nested progressions; ``steps`` is empty then.
    """

    start: int
    steps: tuple[tuple[int, int], ...] = ()
    others: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        if self.others:
            return len(self.others)
        size = 1
        for count, _ in self.steps:
            size *= count
        return size

    def __len__(self) -> int:
        """Return the number of ranks."""
        return self.size

    def __iter__(self) -> Iterator[int]:
        """Yield the ranks in the order of the group."""
        return (self[position] for position in range(self.size))

    def __getitem__(self, position: int) -> int:
        """Return the rank at a position within the group."""
        if not 0 <= position < self.size:
            raise IndexError(position)
        if self.others:
            return self.others[position]
        rank = self.start
        for count, stride in self.steps:
            rank += position % count * stride
            position //= count
        return rank

    def __contains__(self, rank: object) -> bool:
        """Return whether a rank is in the group."""
        if not isinstance(rank, int):
            return False
        if self.others:
            return rank in self.others
        rest = rank - self.start
        for count, stride in sorted(self.steps, key=lambda step: -step[1]):
            if rest < 0:
                return False
            rest -= min(rest // stride, count - 1) * stride
        return rest == 0

    @property
    def last(self) -> int:
        """Return the highest rank."""
        if self.others:
            return max(self.others)
        return self.start + sum((count - 1) * stride for count, stride in self.steps)

    def crosses(self, ranks_per_node: int) -> bool:
        """Return whether the ranks are on more than one node of so many ranks."""
        if self.others:
            return len({rank // ranks_per_node for rank in self.others}) > 1
        return self.start // ranks_per_node != self.last // ranks_per_node

    def on_one_node(self, ranks_per_node: int) -> int:
        """Return the largest number of its ranks that share a node."""
        on_nodes: dict[int, int] = {}
        for rank in self:
            node = rank // ranks_per_node
            on_nodes[node] = on_nodes.get(node, 0) + 1
        return max(on_nodes.values())

    def __str__(self) -> str:
        """Return ``0:8``, ``0:1024:128`` or ``0:8, 128:136, … (4 times, 128 apart)``."""
        if self.others:
            shown = ", ".join(map(str, self.others[:8]))
            return shown + (f", … ({len(self.others)})" if len(self.others) > 8 else "")
        if not self.steps:
            return str(self.start)
        count, stride = self.steps[0]
        text = _progression(self.start, count, stride)
        if len(self.steps) == 1:
            return text
        _, next_stride = self.steps[1]
        following = _progression(self.start + next_stride, count, stride)
        rest = "; ".join(f"{count} times, {stride} apart" for count, stride in self.steps[1:])
        return f"{text}, {following}, … ({rest})"

    def as_json(self) -> dict[str, Any]:
        """Return the list for a JSON file."""
        if self.others:
            return {"ranks": list(self.others)}
        return {"start": self.start, "steps": [list(step) for step in self.steps]}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> RankList:
        """Return the list that `as_json` wrote."""
        if "ranks" in fields:
            return cls(fields["ranks"][0], others=tuple(fields["ranks"]))
        return cls(fields["start"], tuple((count, stride) for count, stride in fields["steps"]))


def ranks_along(sizes: Sequence[int], differs: Sequence[bool], rank: int) -> RankList:
    """Return the ranks whose coordinates differ from those of ``rank`` in some dimensions only.

    Args:
        sizes: of the dimensions, fastest first.
        differs: the dimensions in which they differ.
        rank: within the world of these sizes.
    """
    steps: list[tuple[int, int]] = []
    start, stride, rest = rank, 1, rank
    for size, along in zip(sizes, differs):
        coordinate, rest = rest % size, rest // size
        if along and size > 1:
            steps.append((size, stride))
            start -= coordinate * stride
        stride *= size
    return RankList(start, tuple(_joined(steps)))


def _joined(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join progressions that continue each other: 8 ranks by 1, 16 times by 8, are 128 ranks by 1."""
    joined: list[tuple[int, int]] = []
    for count, stride in steps:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * count, joined[-1][1])
        else:
            joined.append((count, stride))
    return joined


def compressed(ranks: Sequence[int]) -> RankList:
    """Return ranks in short form.

    Raises:
        ValueError: there is no rank.
    """
    if not ranks:
        raise ValueError("a group has at least one rank")
    steps: list[tuple[int, int]] = []
    heads = list(ranks)
    while len(heads) > 1:
        stride = heads[1] - heads[0]
        count = 1
        while count < len(heads) and heads[count] - heads[count - 1] == stride:
            count += 1
        if stride <= 0 or len(heads) % count:
            return RankList(ranks[0], others=tuple(ranks))
        expected = [
            heads[begin] + offset * stride for begin in range(0, len(heads), count) for offset in range(count)
        ]
        if expected != heads:
            return RankList(ranks[0], others=tuple(ranks))
        steps.append((count, stride))
        heads = heads[::count]
    return RankList(ranks[0], tuple(steps))


def _progression(start: int, count: int, stride: int) -> str:
    stop = start + (count - 1) * stride + 1
    return f"{start}:{stop}" if stride == 1 else f"{start}:{start + count * stride}:{stride}"
