"""The proofs of the installed features on the device: those whose worlds fit the GPUs."""

from __future__ import annotations

from dataclasses import replace

from report import Report

from mindspeed_core.feature import Feature, Scenario
from mindspeed_core.registry import Registry
from mindspeed_testing.verify import Verdict, assert_equivalent, verify

_DISTRIBUTIONS = (
    "mindspeed-kernels",
    "mindspeed-profile",
    "mindspeed-cp",
    "mindspeed-moe",
    "mindspeed-memory",
    "mindspeed-tp",
    "mindspeed-pp",
    "mindspeed-optim",
    "mindspeed-models",
)

_WIDER = ("--hidden-size", "256")
"""Flags of a proof that measures nothing, before its own."""
_NOISE = 4.0
"""Times the difference of two trainings without the feature that one with it may have."""


def measure(report: Report) -> None:
    """Verify each scenario; those that find no GPU or no time are named."""
    gpus = max(1, len(report.facts["gpus"]))
    fitting, too_large = scenarios(report.platform, gpus)
    if report.features:
        fitting = [item for item in fitting if item[0].name in report.features]
    number, count = report.slice
    fitting = fitting[number - 1 :: count]
    if report.smoke:
        fitting = fitting[:2]
    late: list[str] = []
    for feature, scenario in fitting:
        name = f"{feature.name} / {scenario.name}"
        if report.remaining() < 20:
            late.append(name)
            continue
        seconds = max(20.0, min(120.0, report.remaining()))
        verdict = verify(feature, wider(scenario), platform=report.platform, timeout=seconds)
        details: dict[str, object] = {
            "largest_error": verdict.largest_error,
            "tolerance": verdict.tolerance,
            "compared": verdict.compared,
            "gains": [str(gain) for gain in verdict.gains],
        }
        passed = verdict.passed
        if not passed:
            details |= {"differences": verdict.differences[:8], "error": verdict.error}
            if only_rounding(verdict) and report.remaining() > 20:
                noise = own_noise(scenario, report.platform, seconds)
                details["baseline_against_itself"] = noise
                passed = verdict.largest_error is not None and verdict.largest_error <= _NOISE * noise
        report.row(name, passed=passed, **details)
    report.facts["left_out"] = {f"more than {gpus} GPU(s)": too_large, "no time": late}
    failed = sum(row["passed"] is False for row in report.rows)
    missing = f"{len(too_large)} need more GPUs, {len(late)} found no time"
    report.headline = f"{failed} of {len(report.rows)} proofs failed; {missing}"


def only_rounding(verdict: Verdict) -> bool:
    """Return whether all that a proof lacks is equal bits, which kernels of a device may not give."""
    gains = all(gain.met for gain in verdict.gains)
    return gains and not verdict.error and verdict.tolerance == 0.0 and verdict.largest_error is not None


def own_noise(scenario: Scenario, platform: str, seconds: float) -> float:
    """Return by how much two trainings without the feature differ."""
    flags, ranks = wider(scenario).baseline, scenario.baseline_world_size or scenario.world_size
    options = {"world_size": ranks, "steps": scenario.steps, "files": scenario.files}
    verdict = assert_equivalent(flags, flags, tolerance=1.0, platform=platform, timeout=seconds, **options)
    return verdict.largest_error or 0.0


def wider(scenario: Scenario) -> Scenario:
    """Return the scenario with heads of 64 instead of 16, as device kernels are made for.

    What the scenario says itself wins. Bounds on what is measured are those of the model as it is.
    """
    if scenario.gains:
        return scenario
    resume = scenario.resume
    if resume is not None:
        resume = replace(resume, flags=(*_WIDER, *resume.flags))
    flags, baseline = (*_WIDER, *scenario.flags), (*_WIDER, *scenario.baseline)
    return replace(scenario, flags=flags, baseline=baseline, resume=resume)


def scenarios(platform: str, gpus: int) -> tuple[list[tuple[type[Feature], Scenario]], list[str]]:
    """Return the scenarios whose worlds fit, and the names of the others.

    Every feature has one before any has two.
    """
    fitting: list[tuple[int, type[Feature], Scenario]] = []
    too_large: list[str] = []
    for record in Registry.discover().features.values():
        if record.dist not in _DISTRIBUTIONS:
            continue
        place = 0
        for scenario in record.cls.verify:
            if platform not in (scenario.platforms or record.cls.platforms):
                continue
            resumed = scenario.resume.world_size if scenario.resume is not None else 0
            if max(scenario.world_size, scenario.baseline_world_size, resumed) > gpus:
                too_large.append(f"{record.cls.name} / {scenario.name}")
            else:
                fitting.append((place, record.cls, scenario))
                place += 1
    fitting.sort(key=lambda item: item[0])
    return [(feature, scenario) for _, feature, scenario in fitting], too_large
