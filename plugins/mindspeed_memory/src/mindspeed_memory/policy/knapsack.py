"""Choice of one form for every layer, so that the least time is added within a number of bytes; no torch.

Layers of one group are alike. Layer by layer the combinations of bytes and seconds are kept that no other one
beats in both, which finds the optimum. Where they become too many, only the fastest one of each interval of
bytes is kept: the result is then at least as fast as the optimum of a budget that is smaller by
``layers / MOST_KEPT`` of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_KEPT = 4096
"""Combinations that are kept after each layer."""


@dataclass(frozen=True)
class Form:
    """A form in which a layer can run.

    Attributes:
        name: of the form.
        nbytes: what the layer keeps beyond the form that keeps least, over all micro-batches under way.
        seconds: time that it adds, over a pass of one micro-batch.
    """

    name: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Group:
    """Layers that are alike.

    Attributes:
        layers: how many there are.
        forms: those in which each of them can run.
    """

    layers: int
    forms: tuple[Form, ...]


@dataclass(frozen=True)
class Plan:
    """A form for every layer.

    Attributes:
        forms: for each group the forms of its layers, those that keep less first.
        nbytes: what they keep together.
        seconds: what they add together.
    """

    forms: tuple[tuple[Form, ...], ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class _State:
    nbytes: int
    seconds: float
    form: Form | None = None
    before: _State | None = None


def fastest_plan(groups: Sequence[Group], budget: int) -> Plan | None:
    """Return the plan that adds the least time and keeps at most ``budget`` bytes; None where none does.

    Args:
        groups: the layers.
        budget: bytes.
    """
    # What later layers take at least must be left.
    least = [group.layers * min(form.nbytes for form in group.forms) for group in groups]
    states = [_State(0, 0.0)]
    for number, group in enumerate(groups):
        smallest = min(form.nbytes for form in group.forms)
        for left in reversed(range(group.layers)):
            reserve = left * smallest + sum(least[number + 1 :])
            found = (
                _State(state.nbytes + form.nbytes, state.seconds + form.seconds, form, state)
                for state in states
                for form in group.forms
                if state.nbytes + form.nbytes + reserve <= budget
            )
            states = _thinned(_unbeaten(found), budget)
    if not states:
        return None
    best = min(states, key=lambda state: (state.seconds, state.nbytes))
    return Plan(tuple(_forms(best, groups)), best.nbytes, best.seconds)


def _unbeaten(states: Iterable[_State]) -> list[_State]:
    """Return the states that no other one beats in bytes and seconds, by bytes."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda state: (state.nbytes, state.seconds)):
        if not kept or state.seconds < kept[-1].seconds:
            kept.append(state)
    return kept


def _thinned(states: list[_State], budget: int) -> list[_State]:
    """Return the fastest state of each interval of bytes where there are too many."""
    if len(states) <= MOST_KEPT:
        return states
    width = max(1, -(-budget // MOST_KEPT))
    # By bytes, and faster ones come later.
    fastest = {state.nbytes // width: state for state in states}
    return list(fastest.values())


def _forms(state: _State, groups: Sequence[Group]) -> list[tuple[Form, ...]]:
    chosen: list[Form] = []
    here: _State | None = state
    while here is not None and here.form is not None:
        chosen.append(here.form)
        here = here.before
    chosen.reverse()
    found, first = [], 0
    for group in groups:
        layers = chosen[first : first + group.layers]
        first += group.layers
        found.append(tuple(sorted(layers, key=lambda form: (form.nbytes, -form.seconds, form.name))))
    return found
