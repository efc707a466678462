"""``mindspeed-features patches``: which symbols of other packages are changed, by whom and why.

The number of patches is a figure that the project publishes; fewer is better.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.feature import Patch
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import Cell, columns, print_heading, print_hint, print_rows, say
from mindspeed_core.terminal.training_flags import (
    UNPROCESSED_FLAGS,
    host_option,
    make_plan,
    platform_option,
    training_flags,
)

_ROOMY = 100
"""Columns of a terminal on which owner, symbol and reason have room beside each other."""


@click.command(
    "patches", short_help="List patched symbols: by whom and why.", context_settings=UNPROCESSED_FLAGS
)
@host_option
@platform_option
@click.option(
    "--all",
    "--verbose",
    "everything",
    is_flag=True,
    help="Every symbol, with the versions its patch was written for, and further holders.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@training_flags
def command(host: str, platform: str | None, everything: bool, as_json: bool, flags: tuple[str, ...]) -> None:
    """List the patches of the platform, the host and the features.

    With FLAGS those that a training with these flags would apply, otherwise those of everything installed.
    On a terminal symbols of one owner with the same reason are one line. In a pipe each symbol is one, its
    columns separated by tabs.
    """
    from dataclasses import replace

    from mindspeed_core.platforms.selection import choose_platform
    from mindspeed_core.registry import Registry

    registry = Registry.discover()
    patches: list[Patch]
    if flags:
        plan = make_plan(registry, flags, host=host, platform=platform).plan
        chosen, patches, names = plan.platform, list(plan.patches), plan.names
    else:
        chosen = choose_platform(platform or "auto", registry)[0]
        names = tuple(registry.features)
        patches = [
            replace(patch, owner=name)
            for name, record in sorted(registry.features.items())
            for patch in record.cls.patches
        ]
    stages = {stage for name in names for stage in registry.features[name].cls.hooks()}
    device = registry.platform(chosen)
    of_host = _of_host(registry.host(host), stages, device.kinds())
    hosts = [replace(patch, owner=f"host {host}") for patch in of_host]
    own = [replace(patch, owner=f"platform {chosen}") for patch in device().patches()]
    found = [*own, *hosts, *patches]
    if as_json:
        import json

        names = ("target", "owner", "kind", "reason", "versions", "required", "also")
        emit(json.dumps([{name: getattr(p, name) for name in names} for p in found], indent=2))
    elif columns() is None or everything:
        _print_symbols(found, everything=everything)
    else:
        _print_owners(found)


def _of_host(host: HostDeclaration, stages: set[str], kinds: frozenset[str]) -> list[Patch]:
    found = list(host.patches)
    if host.on_demand:
        found += load_object(host.on_demand)(stages, kinds)
    return found


def _print_symbols(patches: Sequence[Patch], *, everything: bool) -> None:
    """Print one line for each symbol."""
    headers = ["target", "owner", "kind", "reason"]
    rows = [[patch.target, patch.owner, patch.kind, patch.reason] for patch in patches]
    if everything:
        headers += ["versions", "also"]
        rows = [
            [*row, patch.versions or "any", " ".join(patch.also) or "-"] for row, patch in zip(rows, patches)
        ]
    if columns() is None:
        print_rows([headers, *rows] if rows else [])
    else:
        for owner, members in _by_owner(patches).items():
            emit()
            print_heading(owner)
            for patch in members:
                print_rows([(Cell(f"{patch.kind:<7}", "dim"), Cell(patch.target, "name"))], indent=2)
                also = f"; also {' '.join(patch.also)}" if patch.also else ""
                say(f"{patch.reason} ({patch.versions or 'any version'}{also})", indent=4)
    _print_count(patches)


def _print_owners(patches: Sequence[Patch]) -> None:
    """Print who changes symbols of which modules and why, one line for each owner and reason."""
    rows: list[tuple[str, str, str, str]] = []
    for owner, members in _by_owner(patches).items():
        reasons: dict[str, list[Patch]] = {}
        for patch in members:
            reasons.setdefault(patch.reason, []).append(patch)
        for reason, changed in reasons.items():
            first = owner if not rows or rows[-1][1] != owner else ""
            rows.append((first, owner, _targets(changed), reason))
    if (columns() or _ROOMY) < _ROOMY:
        for number, owner in enumerate(dict.fromkeys(row[1] for row in rows)):
            if number:
                emit()
            print_heading(owner)
            print_rows([(Cell(names, "name"), why) for _, by, names, why in rows if by == owner], indent=2)
    else:
        print_rows([(Cell(first, "bold"), Cell(names, "name"), why) for first, _, names, why in rows])
    _print_count(patches)
    print_hint("mindspeed-features patches --all prints every symbol, -- FLAGS those of one training.")


def _by_owner(patches: Sequence[Patch]) -> dict[str, list[Patch]]:
    owners: dict[str, list[Patch]] = {}
    for patch in patches:
        owners.setdefault(patch.owner, []).append(patch)
    return owners


def _targets(patches: Sequence[Patch]) -> str:
    """Return the name of one symbol, or how many of which packages."""
    if len(patches) == 1:
        return patches[0].target.partition(":")[2]
    packages = dict.fromkeys(patch.target.partition(":")[0].partition(".")[0] for patch in patches)
    return f"{len(patches)} of {', '.join(packages)}"


def _print_count(patches: Sequence[Patch]) -> None:
    owners = len({patch.owner for patch in patches})
    of = f"{owners} owners" if owners > 1 else "one owner"
    if patches:
        emit()
    emit(f"{len(patches)} patches of {of}" if patches else "no patches")
