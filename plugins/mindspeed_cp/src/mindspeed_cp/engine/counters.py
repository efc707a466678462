"""Counters of what attention over a split sequence sends and computes, while somebody counts.

Executors report here. While nobody counts, a report is one comparison with None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_cp.engine.masks import CAUSAL, FULL

if TYPE_CHECKING:
    from mindspeed_cp.engine.tasks import Task

P2P, ALL_TO_ALL, GATHER = "p2p", "all-to-all", "gather"
"""Kinds of transfers: between two ranks, exchanged among all of a group, gathered or scattered in a group."""


@dataclass
class Counters:
    """The work and transfers of one rank while they were active.

    Attributes:
        sent: bytes that went to other ranks, by how.
        pairs: scores that forward computed, of each sample and query head: whole rectangles, half squares,
            and of a rectangle under a mask those that count.
        tokens: of this rank that forward was given, of each sample.
        events: of rings in order: what, of ``post keys``, ``wait keys``, ``compute``, ``post gradients`` and
            ``wait gradients``, and the step of the pass.
    """

    sent: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    tokens: int = 0
    events: list[tuple[str, int]] = field(default_factory=list)

    def add_work(self, work: Any) -> None:
        """Count the scores of an executor's work."""
        for samples, tasks, scores in work:
            found = sum(task_pairs(task, scores.rule) for task in tasks)
            self.pairs += found * (samples.stop - samples.start)


active: Counters | None = None
"""The counters that executors report to; None while nobody counts."""


@contextmanager
def counting() -> Iterator[Counters]:
    """Count what this process sends and computes inside; of nested ones only the innermost counts."""
    global active
    before, active = active, Counters()
    try:
        yield active
    finally:
        active = before


def sent(kind: str, size: int) -> None:
    """Report bytes that go to other ranks."""
    if active is not None:
        active.sent[kind] += size


def event(name: str, step: int) -> None:
    """Report what a ring does."""
    if active is not None:
        active.events.append((name, step))


def task_pairs(task: Task, rule: Any) -> int:
    """Return the number of scores of a task that count."""
    rows, columns = task.rows[1] - task.rows[0], task.columns[1] - task.columns[0]
    if task.kind == FULL:
        return rows * columns
    if task.kind == CAUSAL:
        return rows * (rows + 1) // 2
    first, start = task.origin
    pairs: int = rule.pairs((first, first + rows), (start, start + columns))
    return pairs
