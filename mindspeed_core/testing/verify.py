"""Proof of a feature: train with and without it, compare everything, measure what it should improve.

`mindspeed-features verify` and the tests of plugins run the same function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import Scenario
from mindspeed_core.testing.training import SideResult, train_side
from mindspeed_core.testing.worlds import WorldError

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature, Gain
    from mindspeed_core.testing.compare import Comparison

REPLICA_TOLERANCE = 1e-6
"""Allowed distance of copies of one tensor on several ranks, where the scenario's tolerance is smaller."""

_TIMED_STEPS = 5


@dataclass(frozen=True)
class GainResult:
    """One measured improvement.

    Attributes:
        feature: the value with the feature.
        baseline: the value without; None where the baseline has no such number.
        ratio: feature / baseline; None where it does not exist.
        at_most: the bound, None when the ratio is only reported.
        met: whether the bound holds.
    """

    measure: str
    feature: float | None
    baseline: float | None
    ratio: float | None
    at_most: float | None
    met: bool

    def __str__(self) -> str:
        """Return one line."""
        if self.ratio is None:
            return f"{self.measure}: no ratio of {_number(self.feature)} to {_number(self.baseline)}"
        bound = "" if self.at_most is None else f" (at most {self.at_most:g})"
        return (
            f"{self.measure}: {_number(self.feature)} against {_number(self.baseline)}, "
            f"ratio {self.ratio:.3f}{bound}"
        )


@dataclass(frozen=True)
class Verdict:
    """The outcome of one scenario; plain data, so that it can be printed as JSON.

    Attributes:
        passed: equal within the tolerance, every bound met, the feature active on its side only.
        tolerance: what was demanded.
        largest_error: the largest relative error of anything compared; None when a side failed, or when
            something cannot be compared at all (a shape, a missing tensor, a value that is not finite).
        compared: how many quantities were compared.
        differences: everything outside the tolerance, worst first, one line each.
        error: why a side could not run, or why the comparison means nothing; empty otherwise.
    """

    feature: str
    scenario: str
    passed: bool
    tolerance: float
    largest_error: float | None = None
    compared: int = 0
    differences: tuple[str, ...] = ()
    gains: tuple[GainResult, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        """Return a report for terminals and assertion messages."""
        lines = [f"{self.feature} / {self.scenario}: {'passed' if self.passed else 'FAILED'}"]
        if self.error:
            lines.append(self.error)
        elif self.differences:
            lines.append(
                f"{len(self.differences)} of {self.compared} quantities differ beyond {self.tolerance:g}:"
            )
            lines += [f"  {line}" for line in self.differences[:8]]
        else:
            lines.append(f"{self.compared} quantities agree, largest relative error {self.largest_error:.3g}")
        lines += [f"  {'  ' if gain.met else 'x '}{gain}" for gain in self.gains]
        return "\n".join(lines)


def verify(
    feature: type[Feature],
    scenario: Scenario,
    *,
    platform: str | None = None,
    declarations: Sequence[str] = (),
    timeout: float = 300.0,
) -> Verdict:
    """Run one scenario of a feature.

    Both sides start from the same weights and see the same batches. The baseline is computed once per process
    for each command line and world.

    Args:
        feature: the declaration.
        scenario: one of its ``verify``.
        platform: the platform, None to let the flags decide.
        declarations: ``"module:Name"`` of declarations to use instead of what is installed.
        timeout: seconds for each side.

    Returns:
        The verdict; a side that cannot run is a failed verdict with its error, not an exception.
    """
    name = feature.name
    try:
        comparison, gains, side, baseline = _compare(scenario, declarations, (), platform, timeout)
    except WorldError as error:
        return Verdict(name, scenario.name, passed=False, tolerance=scenario.tolerance, error=str(error))
    problem = ""
    if name not in side.features:
        active = ", ".join(side.features) or "none"
        problem = f"the feature is not active with {' '.join(scenario.flags)!r}; active: {active}"
    elif name in baseline.features:
        problem = f"the feature is active in the baseline too ({' '.join(scenario.baseline)!r})"
    return _verdict(name, scenario.name, comparison, gains, problem)


def assert_equivalent(
    flags: Sequence[str],
    baseline: Sequence[str] = (),
    *,
    world_size: int = 1,
    baseline_world_size: int = 0,
    steps: int = 3,
    tolerance: float = 1e-5,
    gradients: bool = True,
    declarations: Sequence[str] = (),
    probes: Sequence[str] = (),
    platform: str | None = None,
    timeout: float = 300.0,
) -> Verdict:
    """Assert that a training with ``flags`` equals one with ``baseline``: losses, gradients, parameters.

    Args:
        flags: the side under test, appended to the small GPT's flags.
        baseline: the reference.
        world_size: ranks of the side under test.
        baseline_world_size: ranks of the reference; 0 means as many.
        steps: compared steps.
        tolerance: per tensor, see `mindspeed_core.testing.compare.compare_tensors`; 0.0 demands equal bits.
        gradients: compare the gradients of every step.
        declarations: ``"module:Name"`` of features that are not installed.
        probes: ``"module:Class"`` of hook implementations on the side under test.
        platform: the platform, None to let the flags decide.
        timeout: seconds for each side.

    Raises:
        AssertionError: with a report of the worst tensors.
        WorldError: a side cannot run.
    """
    scenario = Scenario(
        name=f"world {world_size}",
        flags=tuple(flags),
        baseline=tuple(baseline),
        world_size=world_size,
        baseline_world_size=baseline_world_size,
        steps=steps,
        tolerance=tolerance,
        compare_gradients=gradients,
    )
    comparison, gains, _, _ = _compare(scenario, declarations, probes, platform, timeout)
    verdict = _verdict(" ".join(flags) or "no flags", scenario.name, comparison, gains, "")
    if not verdict.passed:
        raise AssertionError(str(verdict))
    return verdict


_baselines: dict[tuple[Any, ...], SideResult] = {}


def _compare(
    scenario: Scenario,
    declarations: Sequence[str],
    probes: Sequence[str],
    platform: str | None,
    timeout: float,
) -> tuple[Comparison, tuple[GainResult, ...], SideResult, SideResult]:
    timed = any(gain.measure == "step_seconds" for gain in scenario.gains)
    options: dict[str, Any] = {
        "gradients": scenario.compare_gradients,
        "measure": any(gain.measure != "step_seconds" for gain in scenario.gains),
        "timed_steps": _TIMED_STEPS if timed else 0,
        "declarations": tuple(declarations),
        "platform": platform,
    }
    size, steps = scenario.baseline_world_size or scenario.world_size, scenario.steps
    key = (scenario.baseline, size, steps, *options.values())
    # A time is only comparable with one taken right before it.
    baseline = None if timed else _baselines.get(key)
    if baseline is None:
        baseline = train_side(scenario.baseline, size, steps, timeout=timeout, **options)
        _baselines[key] = baseline
    side = train_side(
        scenario.flags,
        scenario.world_size,
        steps,
        initial=baseline.initial,
        probes=probes,
        timeout=timeout,
        **options,
    )
    comparison = compare_sides(side, baseline, tolerance=scenario.tolerance)
    return comparison, tuple(_gain(gain, side, baseline) for gain in scenario.gains), side, baseline


def compare_sides(side: SideResult, baseline: SideResult, *, tolerance: float) -> Comparison:
    """Compare two sides: losses, gradients of every step, final parameters, and copies within ``side``.

    Args:
        side: the side under test.
        baseline: the reference.
        tolerance: per tensor; copies of one tensor on several ranks may differ by at least
            `REPLICA_TOLERANCE`, since reductions over different groups sum in different orders.
    """
    from mindspeed_core.testing.compare import Comparison, Difference, compare_numbers, compare_tensors

    parts = []
    for name in sorted({*side.losses, *baseline.losses}):
        ours, theirs = side.losses.get(name, ()), baseline.losses.get(name, ())
        parts.append(compare_numbers(ours, theirs, tolerance=tolerance, what=name))
    for index, (mine, other) in enumerate(zip(side.gradients, baseline.gradients), start=1):
        what = f"gradients of step {index}"
        parts.append(compare_tensors(mine.tensors, other.tensors, tolerance=tolerance, what=what))
    parts.append(
        compare_tensors(
            side.parameters.tensors, baseline.parameters.tensors, tolerance=tolerance, what="parameters"
        )
    )
    allowed = max(tolerance, REPLICA_TOLERANCE)
    copies = [
        *((f"gradients of step {index}", state) for index, state in enumerate(side.gradients, start=1)),
        ("parameters", side.parameters),
    ]
    for what, state in copies:
        drifted = state.drifted(allowed)
        found = (
            Difference(f"{what}, copies on several ranks", key, error, within=False)
            for key, error in drifted.items()
        )
        parts.append(Comparison(allowed, tuple(found)))
    return Comparison.of(parts, tolerance)


def _gain(gain: Gain, side: SideResult, baseline: SideResult) -> GainResult:
    values = []
    for result in (side, baseline):
        table = result.measures if gain.measure in result.measures else result.metrics
        values.append(table.get(gain.measure))
    ours, theirs = values
    ratio = ours / theirs if ours is not None and theirs else None
    if ratio is None and gain.at_most is None:
        return GainResult(gain.measure, ours, theirs, None, None, met=ours is not None)
    met = ratio is not None and (gain.at_most is None or ratio <= gain.at_most)
    return GainResult(gain.measure, ours, theirs, ratio, gain.at_most, met)


def _verdict(
    feature: str, scenario: str, comparison: Comparison, gains: tuple[GainResult, ...], problem: str
) -> Verdict:
    return Verdict(
        feature=feature,
        scenario=scenario,
        passed=comparison.equal and all(gain.met for gain in gains) and not problem,
        tolerance=comparison.tolerance,
        largest_error=comparison.largest if math.isfinite(comparison.largest) else None,
        compared=len(comparison.differences),
        differences=tuple(str(difference) for difference in comparison.failures()),
        gains=gains,
        error=problem,
    )


def _number(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
