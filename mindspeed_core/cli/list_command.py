"""``mindspeed-features list``: what is installed, what of it works here, and where packages can be extended.

Loads declarations only: neither torch nor megatron-core, nor rich.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.cli.feature_states import STATE_STYLES, FeatureState, feature_state, platform_here
from mindspeed_core.discovery.entry_points import COMMANDS, TRAIN_COMMANDS
from mindspeed_core.terminal.errors import EXIT_PROBLEMS, traceback_wanted
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import Cell, columns, print_heading, print_hint, print_rows, say, width
from mindspeed_core.terminal.training_flags import platform_option

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord, Registry


_ROOMY = 100
"""Columns of a terminal on which a flag, its feature and its help have room beside each other."""


@click.command("list", short_help="List features, broken plugins, extension points.")
@click.option("--family", default=None, help="Only the features of one family.")
@click.option("--flags", "by_flag", is_flag=True, help="List flags instead, each with its feature.")
@click.option("--all", "everything", is_flag=True, help="Also flags, package, stability and platforms.")
@click.option(
    "--broken", "only_broken", is_flag=True, help="Only broken plugins; exit status 1 if there are any."
)
@platform_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    context: click.Context,
    family: str | None,
    by_flag: bool,
    everything: bool,
    only_broken: bool,
    platform: str | None,
    as_json: bool,
) -> None:
    """List installed features by family, with their level and their state on this machine.

    A feature is ok, falls back to another one, is left out (it has nothing to do here), or needs what the
    list names. The level is the lowest --optimization-level that includes it.

    On a terminal every feature is one line. In a pipe the columns are separated by tabs and nothing is cut.
    """
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    records = sorted(registry.features.values(), key=lambda record: (record.cls.family, record.cls.name))
    if family is not None:
        families = sorted({record.cls.family for record in records})
        if family not in families:
            known = ", ".join(families) or "none"
            raise click.UsageError(f"no installed feature has the family {family!r}; there are: {known}")
        records = [record for record in records if record.cls.family == family]
    if only_broken:
        records = []
    chosen, states = _states(registry, records, platform)
    if as_json:
        import json

        emit(json.dumps(_as_json(registry, records, chosen, states), indent=2))
    else:
        if not only_broken:
            show = _print_flags if by_flag else _print_details if everything else _print_features
            if records:
                show(records, states)
            else:
                emit("no feature is installed; for instance: pip install mindspeed-kernels")
            if family is None and not by_flag:
                _print_extensibility(registry, everything=everything)
            _print_end(records, chosen, everything=everything)
        _print_broken(registry, complain=only_broken)
    context.exit(EXIT_PROBLEMS if only_broken and registry.broken else 0)


def _states(
    registry: Registry, records: Sequence[FeatureRecord], platform: str | None
) -> tuple[str, dict[str, FeatureState]]:
    """Return the platform of this machine, and the state of each feature on it."""
    chosen = platform_here(registry, platform)
    return chosen, {record.cls.name: feature_state(record.cls, registry, chosen) for record in records}


def _as_json(
    registry: Registry, records: Sequence[FeatureRecord], platform: str, states: Mapping[str, FeatureState]
) -> dict[str, Any]:
    return {
        "platform": platform,
        "features": [
            {
                **_attributes(record.cls, "name", "family", "summary", "level", "stability"),
                **_attributes(states[record.cls.name], "state", "needs", "reason", "remedy"),
                "flags": [flag.name for flag in record.cls.flags],
                "platforms": list(record.cls.platforms),
                **_attributes(record, "dist", "version", "hook_api"),
            }
            for record in records
        ],
        "broken": [
            _attributes(broken, "dist", "version", "entry_point", "feature", "error", "remedy")
            for broken in registry.broken
        ],
        "extension_points": [
            _attributes(point, "name", "group", "summary") for point in registry.extension_points().values()
        ],
        "commands": _commands(registry),
        "hosts": sorted(registry.host_names()),
        "platforms": sorted(registry.platform_names()),
    }


def _attributes(item: object, *names: str) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def _by_family(records: Sequence[FeatureRecord]) -> dict[str, list[FeatureRecord]]:
    families: dict[str, list[FeatureRecord]] = {}
    for record in records:
        families.setdefault(record.cls.family, []).append(record)
    return families


def _state_cell(state: FeatureState, wide: int = 0) -> Cell:
    return Cell(f"{state!s:<{wide}}", STATE_STYLES[state.state])


def _print_features(records: Sequence[FeatureRecord], states: Mapping[str, FeatureState]) -> None:
    if columns() is None:
        headers = ("feature", "family", "level", "state", "summary")
        print_rows([headers, *([*_details(r, states[r.cls.name])[:4], r.cls.summary] for r in records)])
        return
    # Columns of the same width in every family; a level has one digit, but its heading five letters.
    longest = max(width(record.cls.name) for record in records)
    state = max(5, *(width(str(states[record.cls.name])) for record in records))
    for number, (family, members) in enumerate(_by_family(records).items()):
        if number:
            emit()
        print_heading(f"{family:<{longest + 2}}", f"level  {'state':<{state}}  summary" if not number else "")
        print_rows(
            [
                (
                    Cell(f"{record.cls.name:<{longest}}", "name"),
                    Cell(f"{record.cls.level:<5}", "dim"),
                    _state_cell(states[record.cls.name], state),
                    record.cls.summary,
                )
                for record in members
            ],
            indent=2,
        )


def _print_flags(records: Sequence[FeatureRecord], states: Mapping[str, FeatureState]) -> None:
    rows = [
        (record.cls.family, flag.name, record.cls.name, flag.help)
        for record in records
        for flag in record.cls.flags
    ]
    limit = columns()
    if limit is None:
        print_rows([("family", "flag", "feature", "help"), *rows])
        return
    for number, family in enumerate(dict.fromkeys(row[0] for row in rows)):
        if number:
            emit()
        print_heading(family)
        members = [row[1:] for row in rows if row[0] == family]
        if limit >= _ROOMY:
            print_rows(
                [(Cell(flag, "name"), Cell(name, "dim"), text) for flag, name, text in members], indent=2
            )
            continue
        for feature in dict.fromkeys(name for _, name, _ in members):
            print_rows([(Cell(feature, "dim"),)], indent=2)
            own = [(Cell(flag, "name"), text) for flag, name, text in members if name == feature]
            print_rows(own, indent=4)


def _print_details(records: Sequence[FeatureRecord], states: Mapping[str, FeatureState]) -> None:
    if columns() is None:
        headers = "feature family level state stability flags package platforms summary".split()
        print_rows([headers, *(_details(record, states[record.cls.name]) for record in records)])
        return
    for number, (family, members) in enumerate(_by_family(records).items()):
        if number:
            emit()
        print_heading(family)
        for record in members:
            cls, state = record.cls, states[record.cls.name]
            print_rows([(Cell(cls.name, "name"), _state_cell(state), cls.summary)], indent=2)
            for flag in cls.flags[:1]:
                others = f" and {len(cls.flags) - 1} more" if len(cls.flags) > 1 else ""
                say(f"{flag.name}{others}", indent=6)
            say(
                f"level {cls.level}, {cls.stability}, {record.dist} {record.version}, "
                f"{' '.join(cls.platforms)}",
                indent=6,
            )


def _details(record: FeatureRecord, state: FeatureState) -> list[str]:
    cls = record.cls
    return [
        cls.name,
        cls.family,
        str(cls.level),
        str(state),
        cls.stability,
        " ".join(flag.name for flag in cls.flags) or "-",
        f"{record.dist} {record.version}",
        " ".join(cls.platforms),
        cls.summary,
    ]


def _print_extensibility(registry: Registry, *, everything: bool) -> None:
    """Print hosts, platforms, sub-commands and extension points: one line each, or one line for each kind."""
    points, commands = registry.extension_points(), _commands(registry)
    rows = [
        ("hosts", ", ".join(sorted(registry.host_names())) or "none"),
        ("platforms", ", ".join(sorted(registry.platform_names())) or "none"),
    ]
    if not everything:
        names = (f"{c['name']} ({c['trouble']})" if c["trouble"] else c["name"] for c in commands)
        rows += [("added commands", ", ".join(names)), ("extension points", ", ".join(points))]
    emit()
    print_rows([(Cell(kind, "bold"), names) for kind, names in rows if names])
    if not everything:
        return
    for command in commands:
        trouble = f" ({command['trouble']})" if command["trouble"] else ""
        say(f"sub-command {command['program']} {command['name']}: {command['package']}{trouble}", hang=4)
    for point in points.values():
        summary = f": {point.summary}" if point.summary else ""
        say(f"extension point {point.name} (entry-point group {point.group}){summary}", hang=4)


def _print_end(records: Sequence[FeatureRecord], platform: str, *, everything: bool) -> None:
    number = f"{len(records)} feature{'' if len(records) == 1 else 's'} on platform {platform}"
    more = "" if everything else " Also: --flags, --family NAME, --all, --json."
    emit()
    print_hint(f"{number}. mindspeed-features show NAME says more about one.{more}")


def _commands(registry: Registry) -> list[dict[str, str]]:
    """List the sub-commands that packages add to either program, without importing them."""
    from mindspeed_core.cli import features
    from mindspeed_core.cli.commands import TRAIN_PROGRAM, added_commands, origin, train_words

    rows = []
    for program, group, own in (
        (features.PROGRAM, COMMANDS, {*features.COMMANDS}),
        (TRAIN_PROGRAM, TRAIN_COMMANDS, train_words(registry)),
    ):
        for name, claims in sorted(added_commands(group, installed=registry.installed).items()):
            if program == features.PROGRAM:
                claims = [claim for claim in claims if features.COMMANDS.get(name, ("",))[0] != claim.dist]
                if not claims:
                    continue
            trouble = "never runs: the program has one of that name" if name in own else ""
            if not trouble and len(claims) > 1:
                trouble = "never runs: claimed twice"
            rows.append({"program": program, "name": name, "package": origin(claims), "trouble": trouble})
    return rows


def _print_broken(registry: Registry, *, complain: bool) -> None:
    if not registry.broken:
        if complain:
            emit("no plugin is broken")
        return
    emit("\nbroken:")
    for broken in registry.broken:
        who = f"{broken.dist} {broken.version}".strip()
        feature = f", feature {broken.feature}" if broken.feature else ""
        say(f"{who}{feature}: {broken.error}", indent=2, hang=2)
        emit(f"    -> {broken.remedy}")
        if broken.traceback and traceback_wanted():
            emit(broken.traceback.rstrip())
