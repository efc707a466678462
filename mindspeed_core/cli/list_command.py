"""``mindspeed-features list``: what is installed, what of it is broken, and where packages can be extended.

Loads declarations only: neither torch nor megatron-core, and rich only for a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.discovery.entry_points import COMMANDS, TRAIN_COMMANDS
from mindspeed_core.terminal.errors import EXIT_PROBLEMS, traceback_wanted
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.wrapped import say

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord, Registry


@click.command("list", short_help="List features, broken plugins, extension points.")
@click.option("--family", default=None, help="Only the features of one family.")
@click.option(
    "--broken", "only_broken", is_flag=True, help="Only broken plugins; exit status 1 if there are any."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, family: str | None, only_broken: bool, as_json: bool) -> None:
    """List installed features with their flags, the plugins that are broken, and the extension points.

    On a terminal the list fits its width. In a pipe every feature is one line, however long.
    """
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    records = sorted(registry.features.values(), key=lambda record: (record.cls.family, record.cls.name))
    if family is not None:
        families = sorted({record.cls.family for record in records})
        if family not in families:
            there = ", ".join(families) or "none"
            raise click.UsageError(f"no installed feature has the family {family!r}; there are: {there}")
        records = [record for record in records if record.cls.family == family]
    if as_json:
        import json

        emit(json.dumps(_as_json(registry, [] if only_broken else records), indent=2))
    else:
        if not only_broken:
            _print_features(records)
            if family is None:
                _print_extensibility(registry)
        _print_broken(registry, complain=only_broken)
    context.exit(EXIT_PROBLEMS if only_broken and registry.broken else 0)


def _as_json(registry: Registry, records: Sequence[FeatureRecord]) -> dict[str, Any]:
    return {
        "features": [
            {
                **_attributes(record.cls, "name", "family", "summary", "level", "stability"),
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


def _print_features(records: Sequence[FeatureRecord]) -> None:
    from mindspeed_core.terminal.tables import print_table

    if not records:
        emit("no feature is installed; for instance: pip install mindspeed-kernels")
        return
    rows = [
        (
            record.cls.name,
            record.cls.family,
            record.cls.level,
            record.cls.stability,
            " ".join(flag.name for flag in record.cls.flags) or "-",
            f"{record.dist} {record.version}",
            " ".join(record.cls.platforms),
            record.cls.summary,
        )
        for record in records
    ]
    headers = ("feature", "family", "level", "stability", "flags", "package", "platforms", "summary")
    print_table(headers, rows, heading=(0, headers.index("summary")))


def _print_extensibility(registry: Registry) -> None:
    emit()
    say(f"hosts: {', '.join(sorted(registry.host_names())) or 'none'}", hang=4)
    say(f"platforms: {', '.join(sorted(registry.platform_names())) or 'none'}", hang=4)
    for command in _commands(registry):
        trouble = f" ({command['trouble']})" if command["trouble"] else ""
        say(f"sub-command {command['program']} {command['name']}: {command['package']}{trouble}", hang=4)
    for point in registry.extension_points().values():
        summary = f": {point.summary}" if point.summary else ""
        say(f"extension point {point.name} (entry-point group {point.group}){summary}", hang=4)


def _commands(registry: Registry) -> list[dict[str, str]]:
    """List the sub-commands that packages add to either program, without importing them."""
    from mindspeed_core.cli import features
    from mindspeed_core.cli.commands import TRAIN_PROGRAM, added_commands, origin, train_words

    found = []
    for program, group, own in (
        (features.PROGRAM, COMMANDS, {*features.COMMANDS}),
        (TRAIN_PROGRAM, TRAIN_COMMANDS, train_words(registry)),
    ):
        for name, claims in sorted(added_commands(group).items()):
            if program == features.PROGRAM:
                claims = [claim for claim in claims if features.COMMANDS.get(name, ("",))[0] != claim.dist]
                if not claims:
                    continue
            trouble = "never runs: the program has one of that name" if name in own else ""
            if not trouble and len(claims) > 1:
                trouble = "never runs: claimed twice"
            found.append({"program": program, "name": name, "package": origin(claims), "trouble": trouble})
    return found


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
