"""``mindspeed-features show NAME``: everything one feature declares, and its documentation page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from mindspeed_core.cli.feature_names import complete_features, find_feature
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.installed import package_file
from mindspeed_core.feature import PROJECT, Conflict, Feature, Flag, Requirement, Scenario
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.wrapped import say

if TYPE_CHECKING:
    from mindspeed_core.flags.flag_set import FlagSet
    from mindspeed_core.registry import FeatureRecord, Registry


@click.command("show", short_help="Show everything one feature declares.")
@click.argument("name", shell_complete=complete_features)
def command(name: str) -> None:
    """Show everything the feature NAME declares: flags, requirements, patches, proofs, its page.

    NAME may also be one of its flags; write -- before it then.
    """
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    record = find_feature(registry, name)
    feature = record.cls
    say(f"{feature.name}: {feature.summary}", hang=4)
    say(
        f"family {feature.family}, level {feature.level}, {feature.stability}, "
        f"{record.dist} {record.version}, declared in {feature.__module__}",
        hang=4,
    )
    _print_flags(registry, feature)
    _section("stages", _stages(feature))
    _section("slots", _slots(registry, feature))
    _section("replaces modules with the roles", list(feature.replaces_roles))
    _section("requires", [_requirement(requirement) for requirement in feature.requires])
    _section("conflicts", [_conflict(conflict) for conflict in _conflicts(registry, record)])
    _section("comes after", list(feature.after))
    _section("comes before", list(feature.before))
    _section("packages", list(feature.packages))
    _section("runs on", _platforms(feature))
    _section(
        "patches",
        [
            f"{patch.kind} {patch.target}{f' ({patch.versions})' if patch.versions else ''}: {patch.reason}"
            for patch in feature.patches
        ],
    )
    _section("proofs", [line for scenario in feature.verify for line in _scenario(scenario)])
    _section("facts", _facts(feature))
    _section("formulas", [f"{name} = {formula}" for name, formula in feature.formulas.items()])
    _section(
        "worth tuning", [f"{flag}: {', '.join(map(str, values))}" for flag, values in feature.tuning.items()]
    )
    _print_page(feature)


def _section(title: str, lines: Iterable[str]) -> None:
    lines = list(lines)
    if lines:
        emit(f"\n{title}:")
        for line in lines:
            say(line, indent=2, hang=2 + len(line) - len(line.lstrip()))


def _print_flags(registry: Registry, feature: type[Feature]) -> None:
    from mindspeed_core.flags.flag_set import flag_set
    from mindspeed_core.terminal.tables import print_table

    installed = registry.host_names()
    known = flag_set(registry, next((host for host in feature.hosts if host in installed), DEFAULT_HOST))
    rows = [
        (
            " ".join(flag.options),
            "switch" if flag.is_switch else getattr(flag.type, "__name__", "value"),
            *_as_installed(flag, known, feature.name),
        )
        for flag in feature.flags
    ]
    if rows:
        emit()
        print_table(("flag", "type", "default", "choices", "meaning"), rows, heading=(0, 4))


def _as_installed(flag: Flag, known: FlagSet, feature: str) -> tuple[object, str, str]:
    """Return default, choices and help of a flag; of one that somebody else defines theirs too."""
    entry = known[flag.name]
    if entry.flag.meaning() != flag.meaning():
        whole, meaning = flag, f"{flag.help} (not usable: {entry.owner} has another flag of this name)"
    else:
        whole, meaning = entry.flag, flag.help
        if entry.owner != feature:
            meaning = f"{whole.help} ({entry.owner})" + (f" {flag.help}" if flag.help != whole.help else "")
    default = "-" if whole.default is None else whole.default
    if not flag.is_switch and flag.default not in (None, whole.default):
        default = f"{default}; {flag.default} with {feature}"
    return default, " ".join(map(str, whole.choices)) or "-", meaning


def _stages(feature: type[Feature]) -> list[str]:
    lines = []
    for stage, function in feature.hooks().items():
        wraps = getattr(function, PROJECT + "_impl")["wrapper"]
        lines.append(f"{'wraps' if wraps else 'implements'} {stage}")
    return lines


def _slots(registry: Registry, feature: type[Feature]) -> list[str]:
    lines = []
    for name in feature.slots:
        slot = registry.slots.get(name)
        lines.append(f"{name}: {slot.summary}" if slot is not None and slot.summary else name)
    return lines


def _value(equals: object, one_of: tuple[object, ...]) -> str:
    if one_of:
        return f" one of {', '.join(map(str, one_of))}"
    return "" if equals is None else f" {equals}"


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _requirement(requirement: Requirement) -> str:
    if requirement.any_of:
        what = " or ".join(requirement.any_of)
    elif requirement.flag:
        what = requirement.flag + _value(requirement.equals, requirement.one_of)
    else:
        what = requirement.feature + (" (switched on with it)" if requirement.implies else "")
    return what + _because(requirement.reason)


def _conflicts(registry: Registry, record: FeatureRecord) -> list[Conflict]:
    """List its own conflicts, and those that other features declare with it."""
    name = record.cls.name
    found = list(record.cls.conflicts)
    own = {conflict.feature for conflict in found}
    for other in registry.features.values():
        for conflict in other.cls.conflicts:
            if conflict.feature == name and other.cls.name not in own:
                found.append(Conflict(feature=other.cls.name, reason=conflict.reason))
    return found


def _conflict(conflict: Conflict) -> str:
    what = conflict.feature or conflict.flag + _value(conflict.equals, conflict.one_of)
    return what + _because(conflict.reason)


def _platforms(feature: type[Feature]) -> list[str]:
    lines = [f"{', '.join(feature.platforms)} ({', '.join(feature.modes)})"]
    if feature.fallback is not None:
        taken = f"{feature.fallback.feature} takes over" if feature.fallback.feature else "it is left out"
        lines.append(f"elsewhere {taken}: {feature.fallback.reason}")
    lines += [f"takes over from {taken.feature}: {taken.reason}" for taken in feature.takes_over]
    return lines


def _scenario(scenario: Scenario) -> list[str]:
    ranks = f"{scenario.world_size} rank{'s' if scenario.world_size > 1 else ''}"
    if scenario.baseline_world_size not in (0, scenario.world_size):
        ranks += f" against {scenario.baseline_world_size}"
    exact = _tolerance(scenario.tolerance)
    gains = "".join(f"; {gain.measure} {gain.demand or 'reported'}" for gain in scenario.gains)
    compared = "" if not scenario.compare else f" in {', '.join(scenario.quantities)}"
    if scenario.resume is not None:
        then = scenario.resume
        return [
            f"{scenario.name}: {ranks}, {scenario.steps} steps, a checkpoint, {then.steps} steps{compared}; "
            f"resumed equal {_tolerance(then.tolerance)}, on {then.world_size} in the other layout {exact}",
            f"    saved    {' '.join(scenario.flags)}",
            f"    resumed  {' '.join(then.flags)}",
        ]
    other = "and" if scenario.same_feature else "without"
    return [
        f"{scenario.name}: {ranks}, {scenario.steps} steps, equal {exact}{compared}{gains}",
        f"    with     {' '.join(scenario.flags)}",
        f"    {other:<7}  {' '.join(scenario.baseline) or '(the plain model)'}",
    ]


def _tolerance(tolerance: float) -> str:
    return "bit for bit" if tolerance == 0.0 else f"within {tolerance:g}"


def _facts(feature: type[Feature]) -> list[str]:
    facts = (
        ("works on fake tensors", feature.fake_tensors),
        ("deterministic", feature.deterministic),
        ("changes what a checkpoint needs to be read", feature.affects_checkpoint),
    )
    return [f"{text}: {'yes' if value else 'no'}" for text, value in facts if value is not None]


def _print_page(feature: type[Feature]) -> None:
    if not feature.docs:
        return
    page = package_file(feature.docs)
    if page is None:
        emit(f"\ndocumentation: {feature.docs} is not in the installed package")
    else:
        emit(f"\ndocumentation ({feature.docs}):\n")
        emit(page.read_text(encoding="utf-8").rstrip())
