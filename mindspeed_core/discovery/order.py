"""The order of features that declarations ask for, and cycles in it.

What a feature requires comes before it, since it builds on it. `Feature.after` and `Feature.before` state an
order, and a statement overrules a requirement: who changes the modules that its requirement placed has to be
the outer wrapper of the two. An order is given as the features that come before each feature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from mindspeed_core.feature import Feature

Order = Mapping[str, Collection[str]]


def stated_order(features: Mapping[str, type[Feature]]) -> dict[str, set[str]]:
    """Return the order that ``after`` and ``before`` state, among these features."""
    earlier: dict[str, set[str]] = {name: set() for name in features}
    for name, feature in features.items():
        earlier[name].update(other for other in feature.after if other in features)
        for other in feature.before:
            if other in features:
                earlier[other].add(name)
    return earlier


def required_order(features: Mapping[str, type[Feature]], *, choices: bool) -> dict[str, set[str]]:
    """Return the order that requirements give; ``choices`` takes alternatives (``any_of``) for required."""
    return {
        name: {
            other
            for requirement in feature.requires
            for other in (requirement.feature, *(requirement.any_of if choices else ()))
            if other in features and other != name
        }
        for name, feature in features.items()
    }


def without_overruled(required: Order, stated: Order) -> dict[str, set[str]]:
    """Return the required order without what the stated one says otherwise, directly or through others."""
    return {name: {o for o in others if not _precedes(name, o, stated)} for name, others in required.items()}


def who_states(first: str, second: str, features: Mapping[str, type[Feature]]) -> str:
    """Return the feature whose ``before`` or ``after`` says that ``first`` comes before ``second``."""
    return first if second in features[first].before else second


def _precedes(first: str, second: str, stated: Order) -> bool:
    """Return whether ``first`` is stated to come before ``second``, directly or through others."""
    waiting, seen = [second], {second}
    while waiting:
        for other in stated.get(waiting.pop(), ()):
            if other == first:
                return True
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return False


def cycles(before: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return a shortest cycle through each node of a directed graph that lies on one, without duplicates.

    Args:
        before: the nodes that come before each node.

    Returns:
        Each cycle begins with its smallest name.
    """
    try:
        TopologicalSorter(before).prepare()
        return []
    except CycleError:
        pass
    found: dict[tuple[str, ...], None] = {}
    for start in sorted(before):
        cycle = _shortest_cycle(before, start)
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
            for other in before.get(name, ()):
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
