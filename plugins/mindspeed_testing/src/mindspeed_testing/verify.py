"""Proof of a feature: train with and without it, compare everything, measure what it should improve.

`mindspeed-features verify` and the tests of plugins run the same function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_core.feature import DeclarationError, Resume, Scenario
from mindspeed_core.hooks.versions import API_VERSION, parsed
from mindspeed_megatron.backend_contracts.hccl import HCCL
from mindspeed_megatron.backend_contracts.nccl import NCCL
from mindspeed_testing.training import SideResult, train_side
from mindspeed_testing.worlds import WorldError

if TYPE_CHECKING:
    from mindspeed_core.feature import Feature, Gain
    from mindspeed_megatron.backend_contracts.contract import BackendContract
    from mindspeed_testing.compare import Comparison
    from mindspeed_testing.compare_sides import Compared

_TIMED_STEPS = 5


@dataclass(frozen=True)
class GainResult:
    """One measured improvement.

    Attributes:
        feature: the value with the feature.
        baseline: the value without; None where the baseline has no such number.
        ratio: feature / baseline; None where it does not exist.
        at_most: the bound of the ratio, None where there is none.
        met: whether everything demanded holds.
        demand: what is demanded, in words; empty where the ratio is only reported.
    """

    measure: str
    feature: float | None
    baseline: float | None
    ratio: float | None
    at_most: float | None
    met: bool
    demand: str = ""

    def __str__(self) -> str:
        """Return one line."""
        demand = f" ({self.demand})" if self.demand else ""
        if self.ratio is None:
            return f"{self.measure}: no ratio of {_number(self.feature)} to {_number(self.baseline)}{demand}"
        return (
            f"{self.measure}: {_number(self.feature)} against {_number(self.baseline)}, "
            f"ratio {self.ratio:.3f}{demand}"
        )


@dataclass(frozen=True)
class Verdict:
    """The outcome of one scenario; plain data, so that it can be printed as JSON.

    Attributes:
        passed: equal within the tolerance, every bound met, the feature active where it should be.
        tolerance: what was demanded.
        largest_error: the largest relative error of anything compared; None when a side failed, or when
            something cannot be compared at all (a shape, a missing tensor, a value that is not finite).
        compared: how many quantities were compared.
        sides: which sides were compared with which, in which layouts, and what of them.
        differences: everything outside the tolerance, worst first, one line each.
        error: why a side could not run, or why the comparison means nothing; empty otherwise.
        remarks: what proofs of packages for a newer hook interface would not pass with, a sentence each.
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
    sides: tuple[Compared, ...] = ()
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return a report for terminals and assertion messages."""
        lines = [f"{self.feature} / {self.scenario}: {'passed' if self.passed else 'FAILED'}"]
        if self.error:
            lines.append(self.error)
        elif self.differences:
            # Several pairs of sides may have a tolerance each.
            allowed = f"{self.tolerance:g}" if len(self.sides) < 2 else "what is allowed"
            lines.append(f"{len(self.differences)} of {self.compared} quantities differ beyond {allowed}:")
            lines += [f"  {line}" for line in self.differences[:8]]
        else:
            error = "" if self.largest_error is None else f", largest relative error {self.largest_error:.3g}"
            lines.append(f"{self.compared} quantities agree{error}")
        lines += [f"  {sides}" for sides in self.sides]
        lines += [f"  {'  ' if gain.met else 'x '}{gain}" for gain in self.gains]
        lines += [f"  {remark}" for remark in self.remarks]
        return "\n".join(lines)


def verify(
    feature: type[Feature],
    scenario: Scenario,
    *,
    platform: str | None = None,
    declarations: Sequence[str] = (),
    contracts: Sequence[BackendContract] | None = None,
    timeout: float = 300.0,
    hook_api: str = API_VERSION,
) -> Verdict:
    """Run one scenario of a feature.

    Both sides start from the same weights and see the same batches. The baseline is computed once per process
    for each command line and world.

    Args:
        feature: the declaration.
        scenario: one of its ``verify``.
        platform: the platform, None to let the flags decide.
        declarations: ``"module:Name"`` of declarations to use instead of what is installed.
        contracts: rules of communication backends that every call must keep; by default those of the
            platforms that the feature is for.
        timeout: seconds for each side.
        hook_api: the hook interface that the feature was written for. Before 1.1 a proof does not say that
            the baseline has the feature too, or which losses only the feature reports: these are remarks.

    Returns:
        The verdict; a side that cannot run is a failed verdict with its error, not an exception.
    """
    name, undeclared = feature.name, parsed(hook_api) < _DECLARED_SINCE
    try:
        rules = contracts_of(scenario.platforms or feature.platforms) if contracts is None else contracts
        outcome = _run(scenario, declarations, (), platform, timeout, rules, undeclared=undeclared)
    except (WorldError, DeclarationError) as error:
        return Verdict(name, scenario.name, passed=False, tolerance=scenario.tolerance, error=str(error))
    problems, remarks = [], list(outcome.remarks)
    for side, flags, wanted in outcome.sides:
        command = f"with {' '.join(flags)!r}"
        if wanted and name not in side.features:
            active = ", ".join(side.features) or "none"
            problems.append(f"the feature is not active {command}; active: {active}")
        elif not wanted and name in side.features:
            where = "the other layout" if scenario.resume is not None else "the baseline"
            found = f"the feature is active in {where} too, {command}"
            if undeclared and scenario.resume is None:
                remarks.append(f"{found}; say so with same_feature=True")
            else:
                problems.append(found)
    verdict = _verdict(name, scenario, outcome, next(iter(problems), ""))
    return replace(verdict, remarks=tuple(remarks))


def assert_equivalent(
    flags: Sequence[str],
    baseline: Sequence[str] = (),
    *,
    world_size: int = 1,
    baseline_world_size: int = 0,
    steps: int = 3,
    tolerance: float = 1e-5,
    compare: Sequence[str] = (),
    extra_losses: Sequence[str] = (),
    extra_parameters: Sequence[str] = (),
    files: Sequence[str] = (),
    resume: Resume | None = None,
    declarations: Sequence[str] = (),
    probes: Sequence[str] = (),
    platform: str | None = None,
    timeout: float = 300.0,
) -> Verdict:
    """Assert that a training with ``flags`` equals one with ``baseline``, or its own continuation.

    Args:
        flags: the side under test, appended to the small GPT's flags.
        baseline: the reference.
        world_size: ranks of the side under test.
        baseline_world_size: ranks of the reference; 0 means as many.
        steps: compared steps; with ``resume`` those before the checkpoint.
        tolerance: per tensor, see `mindspeed_testing.compare.compare_tensors`; 0.0 demands equal bits.
        compare: what is compared; by default losses, gradients and parameters, with ``resume`` everything.
            See `mindspeed_core.feature.Scenario` for this and the next four.
        extra_losses: reported losses that the reference lacks.
        extra_parameters: patterns of parameters that the reference lacks.
        files: small files behind ``{files}`` in the flags.
        resume: stop at a checkpoint and continue; there is no ``baseline`` then.
        declarations: ``"module:Name"`` of features that are not installed.
        probes: ``"module:Class"`` of hook implementations on the side under test.
        platform: the platform, None to let the flags decide.
        timeout: seconds for each side.

    Raises:
        AssertionError: with a report of the worst tensors.
        WorldError: a side cannot run.
    """
    __tracebackhide__ = True
    scenario = Scenario(
        name=f"world {world_size}",
        flags=tuple(flags),
        baseline=tuple(baseline),
        world_size=world_size,
        baseline_world_size=baseline_world_size,
        steps=steps,
        tolerance=tolerance,
        compare=tuple(compare),
        extra_losses=tuple(extra_losses),
        extra_parameters=tuple(extra_parameters),
        files=tuple(files),
        resume=resume,
    )
    try:
        outcome = _run(scenario, declarations, probes, platform, timeout)
    except WorldError as error:
        # The frames in between belong to the harness; the message holds those of the rank that failed.
        raise error.with_traceback(None) from None
    verdict = _verdict(" ".join(flags) or "no flags", scenario, outcome, "")
    if not verdict.passed:
        raise AssertionError(str(verdict))
    return verdict


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a scenario's trainings.

    Attributes:
        sides: each training, its command line, and whether the feature has to be active in it.
        remarks: what a proof for a newer hook interface would have to say.
    """

    comparison: Comparison
    compared: tuple[Compared, ...]
    sides: tuple[tuple[SideResult, tuple[str, ...], bool], ...]
    gains: tuple[GainResult, ...] = ()
    remarks: tuple[str, ...] = ()


_DECLARED_SINCE = (1, 1)
"""The hook interface since which proofs declare what the sides do not share."""


def contracts_of(platforms: Sequence[str]) -> tuple[BackendContract, ...]:
    """Return the rules that a feature for these platforms has to keep, on whatever backend its proof runs."""
    known = {"npu": HCCL["910B"], "cuda": NCCL}
    return tuple(contract for name, contract in known.items() if name in platforms)


_baselines: dict[tuple[Any, ...], SideResult] = {}


def _run(
    scenario: Scenario,
    declarations: Sequence[str],
    probes: Sequence[str],
    platform: str | None,
    timeout: float,
    contracts: Sequence[BackendContract] = (HCCL["910B"], NCCL),
    *,
    undeclared: bool = False,
) -> _Outcome:
    options: dict[str, Any] = {
        "gradients": "gradients" in scenario.quantities,
        "feature_state": "feature state" in scenario.quantities,
        "optimizer_state": "optimizer state" in scenario.quantities,
        "files": scenario.files,
        "declarations": tuple(declarations),
        "platform": platform,
        "contracts": tuple(contracts),
    }
    if scenario.resume is None:
        return _beside_baseline(scenario, options, probes, timeout, undeclared)
    from mindspeed_testing.resume_proof import train_and_resume

    comparison, compared, sides = train_and_resume(
        scenario, scenario.resume, probes=probes, timeout=timeout, **options
    )
    (_, ours, _), (_, other, active) = scenario.sides()
    commands = ((ours, True), (ours, True), (other, active))
    return _Outcome(comparison, compared, tuple((side, *command) for side, command in zip(sides, commands)))


def _beside_baseline(
    scenario: Scenario, options: dict[str, Any], probes: Sequence[str], timeout: float, undeclared: bool
) -> _Outcome:
    from mindspeed_testing.compare_sides import Compared, compare_sides

    timed = any(gain.measure == "step_seconds" for gain in scenario.gains)
    options = options | {
        "measure": any(gain.measure != "step_seconds" for gain in scenario.gains),
        "timed_steps": _TIMED_STEPS if timed else 0,
    }
    size, steps = scenario.baseline_world_size or scenario.world_size, scenario.steps
    rules = tuple(contract.name for contract in options["contracts"])
    key = (scenario.baseline, size, steps, *(options | {"contracts": rules}).values())
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
        extra_parameters=scenario.extra_parameters,
        probes=probes,
        timeout=timeout,
        **options,
    )
    new = sorted(side.losses.keys() - baseline.losses.keys() - {*scenario.extra_losses}) if undeclared else []
    remarks = [f"only one side reports {new}; say so with extra_losses={tuple(new)!r}"] if new else []
    comparison, counts = compare_sides(
        side,
        baseline,
        tolerance=scenario.tolerance,
        quantities=scenario.quantities,
        demanded=scenario.compare,
        extra_losses=(*scenario.extra_losses, *new),
        extra_parameters=scenario.extra_parameters,
    )
    return _Outcome(
        comparison,
        (Compared(side.layout, baseline.layout, scenario.tolerance, counts),),
        ((side, scenario.flags, True), (baseline, scenario.baseline, scenario.same_feature)),
        tuple(_gain(_on(side.platform, gain), side, baseline) for gain in scenario.gains),
        tuple(remarks),
    )


def _on(platform: str, gain: Gain) -> Gain:
    """Return the gain as a platform has it: without bounds where these are those of others."""
    if not gain.platforms or platform in gain.platforms:
        return gain
    return replace(gain, at_most=None, exactly=None, less=None, value_at_most=None)


def _gain(gain: Gain, side: SideResult, baseline: SideResult) -> GainResult:
    values = []
    for result in (side, baseline):
        table = result.measures if gain.measure in result.measures else result.metrics
        values.append(table.get(gain.measure))
    ours, theirs = values
    ratio = ours / theirs if ours is not None and theirs else None
    return GainResult(
        gain.measure, ours, theirs, ratio, gain.at_most, _met(gain, ours, theirs, ratio), gain.demand
    )


def _met(gain: Gain, ours: float | None, theirs: float | None, ratio: float | None) -> bool:
    """Return whether everything demanded of a measure holds; a number that is missing meets no demand."""
    if ours is None:
        return False
    return (
        (gain.at_most is None or (ratio is not None and ratio <= gain.at_most))
        and (gain.exactly is None or ours == gain.exactly)
        and (gain.less is None or (theirs is not None and theirs - ours == gain.less))
        and (gain.value_at_most is None or ours <= gain.value_at_most)
    )


def _verdict(feature: str, scenario: Scenario, outcome: _Outcome, problem: str) -> Verdict:
    comparison = outcome.comparison
    blocked = [line for side, _, _ in outcome.sides for line in side.blocked]
    problem = problem or next(iter(blocked), "")
    return Verdict(
        feature=feature,
        scenario=scenario.name,
        passed=comparison.equal and all(gain.met for gain in outcome.gains) and not problem,
        tolerance=scenario.tolerance,
        largest_error=comparison.largest if math.isfinite(comparison.largest) else None,
        compared=len(comparison.differences),
        differences=tuple(str(difference) for difference in comparison.failures()),
        gains=outcome.gains,
        error=problem,
        sides=outcome.compared,
    )


def _number(value: float | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
