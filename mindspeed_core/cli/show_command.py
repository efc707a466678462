"""``mindspeed-features show NAME``: what a feature does; on request all that it declares, or its page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mindspeed_core.cli.feature_states import STATE_STYLES, state_here
from mindspeed_core.discovery.host import DEFAULT_HOST
from mindspeed_core.discovery.installed import package_file
from mindspeed_core.errors import UserError
from mindspeed_core.feature import PROJECT, Conflict, Feature, Flag, Requirement, Scenario
from mindspeed_core.flags.help import placeholder
from mindspeed_core.resolver.request import condition_text
from mindspeed_core.terminal.feature_names import complete_features, find_feature
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import (
    Cell,
    print_heading,
    print_hint,
    print_labelled,
    print_rows,
    print_section,
    say,
)
from mindspeed_core.terminal.training_flags import platform_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mindspeed_core.flags.flag_set import FlagSet
    from mindspeed_core.registry import FeatureRecord, Registry


@click.command("show", short_help="Show what one feature does, its flags, its conditions.")
@click.argument("name", shell_complete=complete_features)
@click.option("--all", "everything", is_flag=True, help="Also stages, slots, patches and facts.")
@click.option("--proofs", is_flag=True, help="Print every proof with its two command lines instead.")
@click.option("--page", is_flag=True, help="Print its documentation page instead.")
@platform_option
def command(name: str, everything: bool, proofs: bool, page: bool, platform: str | None) -> None:
    """Show what the feature NAME does, its flags, and what it needs and excludes.

    NAME may also be one of its flags; write -- before it then.
    """
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    record = find_feature(registry, name)
    if page:
        _print_page(record.cls)
        return
    if proofs:
        _print_proofs(record.cls)
        return
    _print_head(registry, record, platform)
    _print_flags(registry, record.cls, everything=everything)
    _print_conditions(registry, record)
    if everything:
        _print_declarations(registry, record.cls)
    if record.cls.verify:
        emit()
        print_labelled("proofs", _proof_line(record.cls.verify))
    elif record.cls.trains_nothing:
        emit()
        print_labelled("proofs", f"none: {record.cls.trains_nothing}")
    emit()
    more = [] if everything else [f"mindspeed-features show {record.cls.name} --all: stages, patches, facts"]
    if record.cls.verify:
        more.append(f"mindspeed-features show {record.cls.name} --proofs: what holds it to its promise")
    if record.cls.docs:
        more.append(f"mindspeed-features show {record.cls.name} --page: how it works")
    for line in more:
        print_hint(line)


def _print_head(registry: Registry, record: FeatureRecord, platform: str | None) -> None:
    """Print what the feature is for, whether it works here, and where it comes from."""
    feature = record.cls
    chosen, state = state_here(registry, feature, platform)
    print_heading(feature.name, f"{record.dist} {record.version}")
    say(feature.summary)
    emit()
    print_labelled("here", Cell(f"{state} (platform {chosen})", STATE_STYLES[state.state]))
    if state.reason:
        print_labelled("", state.reason)
    if state.remedy:
        # A command to copy stays in one piece.
        emit(f"          -> {state.remedy}")
    prototype = f", {feature.stability}" if feature.stability != "stable" else ""
    level = f"{feature.level} (on with --optimization-level {feature.level} or more){prototype}"
    print_labelled("level", level)
    print_labelled("family", feature.family)
    print_labelled("runs on", f"{', '.join(feature.platforms)} ({', '.join(feature.modes)})")
    if feature.hosts:
        print_labelled("hosts", ", ".join(feature.hosts))


def _print_conditions(registry: Registry, record: FeatureRecord) -> None:
    """Print what has to be there, what must not, and who does its work elsewhere."""
    feature = record.cls
    print_section("requires", [_requirement(requirement) for requirement in feature.requires])
    print_section("packages", list(feature.packages))
    print_section("conflicts", [_conflict(conflict) for conflict in _conflicts(registry, record)])
    print_section("fills", _slots(registry, feature))
    print_section("elsewhere", _elsewhere(feature))


def _print_declarations(registry: Registry, feature: type[Feature]) -> None:
    """Print the rest of what a feature declares, for authors."""
    print_section("declared in", [feature.__module__])
    print_section("stages", _stages(feature))
    print_section("replaces modules with the roles", list(feature.replaces_roles))
    print_section("comes after", list(feature.after))
    print_section("comes before", list(feature.before))
    print_section(
        "patches",
        [
            f"{patch.kind} {patch.target}{f' ({patch.versions})' if patch.versions else ''}: {patch.reason}"
            for patch in feature.patches
        ],
    )
    print_section("facts", _facts(feature))
    print_section("formulas", [f"{name} = {formula}" for name, formula in feature.formulas.items()])
    print_section(
        "worth tuning", [f"{flag}: {', '.join(map(str, values))}" for flag, values in feature.tuning.items()]
    )


def _print_flags(registry: Registry, feature: type[Feature], *, everything: bool) -> None:
    """Print one line a flag, or every flag with its type, choices and whole help."""
    from mindspeed_core.flags.flag_set import flag_set

    if not feature.flags:
        return
    installed = registry.host_names()
    known = flag_set(registry, next((host for host in feature.hosts if host in installed), DEFAULT_HOST))
    emit()
    print_heading("flags")
    described = [(flag, *_as_installed(flag, known, feature.name)) for flag in feature.flags]
    if everything:
        for flag, default, choices, meaning in described:
            kind = "switch" if flag.is_switch else getattr(flag.type, "__name__", "value")
            facts = [f"default {default}" if default != "-" and not flag.is_switch else ""]
            facts += [f"one of {choices}" if choices != "-" else ""]
            say(f"{' '.join(flag.options)}  {', '.join([kind, *filter(None, facts)])}", indent=2, hang=4)
            say(meaning, indent=6)
        return
    print_rows(
        [
            (
                Cell(f"{flag.name}{'' if flag.is_switch else f' {placeholder(flag)}'}", "name"),
                f"{meaning}{'' if flag.is_switch or default == '-' else f' (default {default})'}",
            )
            for flag, default, _, meaning in described
        ],
        indent=2,
        tabs=False,
    )


def _as_installed(flag: Flag, flag_set: FlagSet, feature: str) -> tuple[object, str, str]:
    """Return default, choices and help of a flag; of one that somebody else defines theirs too."""
    entry = flag_set[flag.name]
    if entry.flag.meaning() != flag.meaning():
        whole, meaning = flag, f"{flag.help} (not usable: {entry.owner} has another flag of this name)"
    else:
        whole, meaning = entry.flag, flag.help
        if entry.owner != feature:
            meaning = f"{whole.help} ({entry.owner})" + (f" {flag.help}" if flag.help != whole.help else "")
    default = "-" if whole.default in (None, "") else whole.default
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


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _requirement(requirement: Requirement) -> str:
    if requirement.any_of:
        condition = " or ".join(requirement.any_of)
    elif requirement.flag:
        condition = condition_text(requirement)
    else:
        condition = requirement.feature + (" (switched on with it)" if requirement.implies else "")
    return condition + _because(requirement.reason)


def _conflicts(registry: Registry, record: FeatureRecord) -> list[Conflict]:
    """List its own conflicts, and those that other features declare with it."""
    name = record.cls.name
    conflicts = list(record.cls.conflicts)
    own = {conflict.feature for conflict in conflicts}
    for other in registry.features.values():
        for conflict in other.cls.conflicts:
            if conflict.feature == name and other.cls.name not in own:
                conflicts.append(Conflict(feature=other.cls.name, reason=conflict.reason))
    return conflicts


def _conflict(conflict: Conflict) -> str:
    condition = conflict.feature or condition_text(conflict)
    return condition + _because(conflict.reason)


def _elsewhere(feature: type[Feature]) -> list[str]:
    lines = []
    for where, fallback in (("platforms", feature.fallback), ("modes", feature.mode_fallback)):
        if fallback is not None:
            taken = f"{fallback.feature} takes over" if fallback.feature else "it is left out"
            lines.append(f"{'in' if where == 'modes' else 'on'} other {where} {taken}: {fallback.reason}")
    lines += [f"takes over from {taken.feature}: {taken.reason}" for taken in feature.takes_over]
    return lines


def _proof_line(proofs: Sequence[Scenario]) -> str:
    """Return how many proofs there are, how many processes they take, and how close they hold."""
    number = f"{len(proofs)} proof{'s' if len(proofs) > 1 else ''}"
    sizes = sorted({scenario.world_size for scenario in proofs})
    ranks = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    exact = sum(scenario.tolerance == 0.0 for scenario in proofs)
    loosest = max(scenario.tolerance for scenario in proofs)
    held = "all bit for bit" if not loosest else f"{exact} bit for bit, the others within {loosest:g}"
    if not exact:
        held = f"within {loosest:g}"
    return f"{number} on {ranks} rank{'' if sizes == [1] else 's'}, {held}"


def _print_proofs(feature: type[Feature]) -> None:
    """Print every proof of a feature.

    Raises:
        UserError: it declares none.
    """
    if not feature.verify:
        why = f": {feature.trains_nothing}" if feature.trains_nothing else ""
        raise UserError(f"the feature {feature.name} declares no proofs{why}")
    print_heading(f"{feature.name}: {_proof_line(feature.verify)}")
    for scenario in feature.verify:
        print_section(scenario.name, _scenario(scenario))
    emit()
    print_hint(f"mindspeed-features verify {feature.name}: run them")


def _scenario(scenario: Scenario) -> list[str]:
    """Return what a proof compares, and its two command lines."""
    ranks = f"{scenario.world_size} rank{'s' if scenario.world_size > 1 else ''}"
    if scenario.baseline_world_size not in (0, scenario.world_size):
        ranks += f" against {scenario.baseline_world_size}"
    exact = _tolerance(scenario.tolerance)
    gains = "".join(f"; {gain.measure} {gain.demand or 'reported'}" for gain in scenario.gains)
    compared = "" if not scenario.compare else f" in {', '.join(scenario.quantities)}"
    if scenario.resume is not None:
        then = scenario.resume
        return [
            f"{ranks}, {scenario.steps} steps, a checkpoint, {then.steps} steps{compared}; "
            f"resumed equal {_tolerance(then.tolerance)}, on {then.world_size} in the other layout {exact}",
            f"saved    {' '.join(scenario.flags)}",
            f"resumed  {' '.join(then.flags)}",
        ]
    other = "and" if scenario.same_feature else "without"
    return [
        f"{ranks}, {scenario.steps} steps, equal {exact}{compared}{gains}",
        f"with     {' '.join(scenario.flags)}",
        f"{other:<7}  {' '.join(scenario.baseline) or '(the plain model)'}",
    ]


def _tolerance(tolerance: float) -> str:
    return "bit for bit" if tolerance == 0.0 else f"within {tolerance:g}"


def _facts(feature: type[Feature]) -> list[str]:
    facts = (
        ("works on fake tensors", feature.fake_tensors),
        ("deterministic", feature.deterministic),
        ("changes what a checkpoint needs to be read", feature.affects_checkpoint),
    )
    found = [f"{text}: {'yes' if value else 'no'}" for text, value in facts if value is not None]
    if feature.checkpoint_as:
        found.append(f"checkpoints are those of {feature.checkpoint_as}; each reads the other's")
    return found


def _print_page(feature: type[Feature]) -> None:
    page = package_file(feature.docs) if feature.docs else None
    if page is not None:
        emit(page.read_text(encoding="utf-8").rstrip())
    elif feature.docs:
        raise UserError(f"{feature.docs} is not in the installed package; reinstall it")
    else:
        raise UserError(f"the feature {feature.name} has no documentation page")
