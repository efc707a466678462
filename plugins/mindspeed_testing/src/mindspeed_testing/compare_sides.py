"""Comparison of two trainings, quantity by quantity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_core.feature import QUANTITIES
from mindspeed_testing.canonical import CanonicalState, matches
from mindspeed_testing.compare import Comparison, Difference, compare_numbers, compare_tensors
from mindspeed_testing.training import SideResult

REPLICA_TOLERANCE = 1e-6
"""Allowed distance of copies of one tensor on several ranks, where the tolerance is smaller."""


@dataclass(frozen=True)
class Compared:
    """Two sides that were compared; plain data.

    Attributes:
        side: the side under test and its layout.
        reference: what it was compared with.
        tolerance: what was demanded.
        quantities: how many tensors or numbers of each kind were compared.
    """

    side: str
    reference: str
    tolerance: float
    quantities: Mapping[str, int]

    def __str__(self) -> str:
        """Return one line."""
        names = ", ".join(name for name, count in self.quantities.items() if count)
        return f"{names or 'nothing'}: {self.side} against {self.reference}"


def compare_sides(
    side: SideResult,
    baseline: SideResult,
    *,
    tolerance: float,
    quantities: Sequence[str] = QUANTITIES[:3],
    demanded: Sequence[str] = (),
    extra_losses: Sequence[str] = (),
    extra_parameters: Sequence[str] = (),
    prefix: str = "",
) -> tuple[Comparison, dict[str, int]]:
    """Compare two sides, and the copies of tensors within ``side``.

    Args:
        side: the side under test.
        baseline: the reference.
        tolerance: per tensor; copies of one tensor on several ranks may differ by at least
            `REPLICA_TOLERANCE`, since reductions over different groups sum in different orders.
        quantities: names out of `mindspeed_core.feature.QUANTITIES`.
        demanded: those of them that at least one side must have.
        extra_losses: losses that only ``side`` reports.
        extra_parameters: patterns of parameters that only ``side`` has.
        prefix: begins the name of every quantity in the report.

    Returns:
        The comparison, and how many tensors or numbers of each quantity it holds.
    """
    parts = {
        name: _COMPARE[name](side, baseline, tolerance, extra_losses, extra_parameters) for name in quantities
    }
    counts = {name: sum(len(part.differences) for part in found) for name, found in parts.items()}
    every = [part for found in parts.values() for part in found]
    every += [_nothing(name) for name in demanded if counts.get(name) == 0]
    every += _copies(side, max(tolerance, REPLICA_TOLERANCE), quantities)
    whole = Comparison.of(every, tolerance)
    if prefix:
        renamed = (replace(found, quantity=f"{prefix}{found.quantity}") for found in whole.differences)
        whole = Comparison(tolerance, tuple(renamed))
    return whole, counts


def _nothing(name: str) -> Comparison:
    detail = "is among what the proof compares, but neither side has any"
    return Comparison(0.0, (Difference("compare", name, math.inf, detail, within=False),))


def _losses(
    side: SideResult, baseline: SideResult, tolerance: float, extra: Sequence[str], _: Sequence[str]
) -> list[Comparison]:
    parts = []
    for name in sorted({*side.losses, *baseline.losses, *extra}):
        ours, theirs = side.losses.get(name, ()), baseline.losses.get(name, ())
        if name not in extra:
            parts.append(compare_numbers(ours, theirs, tolerance=tolerance, quantity=name))
        elif not ours:
            parts.append(_only(name, "is among extra_losses, but the side under test does not report it"))
        elif theirs:
            parts.append(_only(name, "is among extra_losses, but the baseline reports it too"))
    return parts


def _only(name: str, detail: str) -> Comparison:
    return Comparison(0.0, (Difference("losses", name, math.inf, detail, within=False),))


def _gradients(
    side: SideResult, baseline: SideResult, tolerance: float, _: Sequence[str], extra: Sequence[str]
) -> list[Comparison]:
    return [
        _states(gradient, other, tolerance, extra, f"gradients of step {index}")
        for index, (gradient, other) in enumerate(zip(side.gradients, baseline.gradients), start=1)
    ]


def _parameters(
    side: SideResult, baseline: SideResult, tolerance: float, _: Sequence[str], extra: Sequence[str]
) -> list[Comparison]:
    found = [_states(side.parameters, baseline.parameters, tolerance, extra, "parameters")]
    new = side.parameters.tensors.keys() - baseline.parameters.tensors.keys()
    for pattern in extra:
        if not any(matches(key, (pattern,)) for key in new):
            detail = "is among extra_parameters, but fits no parameter that only the side under test has"
            found.append(
                Comparison(0.0, (Difference("parameters", pattern, math.inf, detail, within=False),))
            )
    return found


def _states(
    state: CanonicalState, other: CanonicalState, tolerance: float, extra: Sequence[str], quantity: str
) -> Comparison:
    kept = {
        key: tensor
        for key, tensor in state.tensors.items()
        if key in other.tensors or not matches(key, extra)
    }
    return compare_tensors(kept, other.tensors, tolerance=tolerance, quantity=quantity)


def _learning_rates(
    side: SideResult, baseline: SideResult, tolerance: float, _: Sequence[str], __: Sequence[str]
) -> list[Comparison]:
    pairs = zip(side.learning_rates, baseline.learning_rates)
    return [
        compare_numbers(own, other, tolerance=tolerance, quantity=f"learning rates of step {index}")
        for index, (own, other) in enumerate(pairs, start=1)
    ]


def _feature_state(
    side: SideResult, baseline: SideResult, tolerance: float, _: Sequence[str], __: Sequence[str]
) -> list[Comparison]:
    assert side.saved is not None
    assert baseline.saved is not None
    saved, other = side.saved, baseline.saved
    quantity = "feature state"
    texts = [
        Difference(
            quantity, key, 0.0 if ours == theirs else math.inf, f"{ours} against {theirs}", ours == theirs
        )
        for key in sorted({*saved.texts, *other.texts})
        for ours, theirs in [(saved.texts.get(key, "nothing"), other.texts.get(key, "nothing"))]
    ]
    return [
        compare_tensors(
            saved.features.tensors, other.features.tensors, tolerance=tolerance, quantity=quantity
        ),
        Comparison(tolerance, tuple(texts)),
    ]


def _optimizer_state(
    side: SideResult, baseline: SideResult, tolerance: float, _: Sequence[str], extra: Sequence[str]
) -> list[Comparison]:
    assert side.saved is not None
    assert baseline.saved is not None
    own, other = side.saved.optimizer, baseline.saved.optimizer
    return [_states(own, other, tolerance, extra, "optimizer state")]


_COMPARE = {
    "losses": _losses,
    "gradients": _gradients,
    "parameters": _parameters,
    "learning rates": _learning_rates,
    "feature state": _feature_state,
    "optimizer state": _optimizer_state,
}


def _copies(side: SideResult, allowed: float, quantities: Sequence[str]) -> list[Comparison]:
    states = [(f"gradients of step {index}", state) for index, state in enumerate(side.gradients, start=1)]
    states.append(("parameters", side.parameters))
    if side.saved is not None and "feature state" in quantities:
        states.append(("feature state", side.saved.features))
    if side.saved is not None and "optimizer state" in quantities:
        states.append(("optimizer state", side.saved.optimizer))
    return [
        Comparison(
            allowed,
            tuple(
                Difference(f"{quantity}, copies on several ranks", key, error, within=False)
                for key, error in state.drifted(allowed).items()
            ),
        )
        for quantity, state in states
    ]
