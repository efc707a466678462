"""Numbers of a machine that make predicted steps equal to measured ones.

Few runs do not determine all numbers: each is pulled softly towards where it begins, a microbenchmark, so
that what no run constrains stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mindspeed_tune.extrapolate import Whole
from mindspeed_tune.hardware import Hardware
from mindspeed_tune.record import RankRecord
from mindspeed_tune.step_plan import step_plan

FITTED = ("flops", "memory_bandwidth", "launch", "latency_within_node")
PULL = 0.003
"""Weight of a number's distance from where it begins, against the squared relative errors of steps."""
_SENSITIVE = 0.02
"""A number that changes no step by this part when it doubles is not constrained by the runs."""
_ROUNDS, _STEPS = 40, (2.0, 1.3, 1.1, 1.03, 1.01)


@dataclass(frozen=True)
class MeasuredRun:
    """A run whose step is both predicted and measured.

    Attributes:
        name: of its layout.
        records: one for every pipeline stage.
        wholes: their whole steps.
        seconds: measured.
    """

    name: str
    records: Sequence[RankRecord]
    wholes: Sequence[Whole]
    seconds: float

    def predicted(self, hardware: Hardware) -> float:
        """Return the seconds of the step by a hardware's numbers."""
        found = step_plan(self.records, self.wholes, hardware).seconds
        assert found is not None
        return found


@dataclass(frozen=True)
class Fit:
    """The outcome of a fit.

    Attributes:
        hardware: with the fitted numbers.
        errors: by run, how far its predicted step is from the measured one.
        unconstrained: of the fitted numbers, those that no run tells.
    """

    hardware: Hardware
    errors: Mapping[str, float]
    unconstrained: tuple[str, ...]


def fit(start: Hardware, runs: Sequence[MeasuredRun]) -> Fit:
    """Return the numbers that explain measured steps best, beginning at a hardware's."""
    scales = dict.fromkeys(FITTED, 1.0)
    best = _cost(start, scales, runs)
    for step in _STEPS:
        for _ in range(_ROUNDS):
            before = best
            for name in FITTED:
                for factor in (step, 1 / step):
                    tried = {**scales, name: scales[name] * factor}
                    cost = _cost(start, tried, runs)
                    if cost < best:
                        best, scales = cost, tried
            if best > before * (1 - 1e-6):
                break
    found = _scaled(start, scales)
    return Fit(
        found,
        {run.name: run.predicted(found) / run.seconds - 1 for run in runs},
        tuple(name for name in FITTED if not _tells(found, name, runs)),
    )


def _cost(start: Hardware, scales: Mapping[str, float], runs: Sequence[MeasuredRun]) -> float:
    hardware = _scaled(start, scales)
    errors = sum(math.log(run.predicted(hardware) / run.seconds) ** 2 for run in runs)
    return errors + PULL * sum(math.log(scale) ** 2 for scale in scales.values())


def _tells(hardware: Hardware, name: str, runs: Sequence[MeasuredRun]) -> bool:
    other = _scaled(hardware, {**dict.fromkeys(FITTED, 1.0), name: 2.0})
    return any(abs(run.predicted(other) / run.predicted(hardware) - 1) > _SENSITIVE for run in runs)


_CHANGES: Mapping[str, Callable[[Hardware, float], Hardware]] = {
    "flops": lambda one, scale: replace(one, flops={k: v * scale for k, v in one.flops.items()}),
    "memory_bandwidth": lambda one, scale: replace(one, memory_bandwidth=one.memory_bandwidth * scale),
    "launch": lambda one, scale: replace(one, launch=one.launch * scale),
    "latency_within_node": lambda one, scale: replace(
        one, latency_within_node=one.latency_within_node * scale
    ),
}


def _scaled(hardware: Hardware, scales: Mapping[str, float]) -> Hardware:
    for name, scale in scales.items():
        hardware = _CHANGES[name](hardware, scale)
    return hardware
