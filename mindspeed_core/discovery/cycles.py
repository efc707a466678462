"""Cycles of a directed graph, apart from what its nodes mean: features that come before themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def cycles(before: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return a shortest cycle through each node of a directed graph that lies on one, without duplicates.

    Args:
        before: the nodes that come before each node.

    Returns:
        Each cycle begins with its smallest name.
    """
    # What remains after peeling off nodes without predecessors and nodes without successors is small.
    alive = {name: [b for b in befores if b in before] for name, befores in before.items()}
    while True:
        pointed = {b for befores in alive.values() for b in befores}
        dead = [name for name, befores in alive.items() if not befores or name not in pointed]
        if not dead:
            break
        for name in dead:
            del alive[name]
        alive = {name: [b for b in befores if b in alive] for name, befores in alive.items()}
    found: dict[tuple[str, ...], None] = {}
    for start in sorted(alive):
        cycle = _shortest_cycle(alive, start)
        if cycle:
            first = cycle.index(min(cycle))
            found[cycle[first:] + cycle[:first]] = None
    return list(found)


def _shortest_cycle(before: Mapping[str, Sequence[str]], start: str) -> tuple[str, ...]:
    came: dict[str, str] = {}
    frontier = [start]
    while frontier:
        following = []
        for name in frontier:
            for other in before[name]:
                if other == start:
                    path = [name]
                    while path[-1] != start:
                        path.append(came[path[-1]])
                    return tuple(reversed(path))
                if other not in came and other != start:
                    came[other] = name
                    following.append(other)
        frontier = following
    return ()
