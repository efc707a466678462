"""``mindspeed-features patches``: which symbols of other packages are changed, by whom and why.

The number of patches is a figure that the project publishes; fewer is better.
"""

from __future__ import annotations

import click

from mindspeed_core.discovery.entry_points import load_object
from mindspeed_core.discovery.host import HostDeclaration
from mindspeed_core.feature import Patch
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.training_flags import (
    UNPROCESSED_FLAGS,
    host_option,
    make_plan,
    platform_option,
    training_flags,
)


@click.command(
    "patches", short_help="List patched symbols: by whom and why.", context_settings=UNPROCESSED_FLAGS
)
@host_option
@platform_option
@click.option(
    "--verbose", is_flag=True, help="Also the versions a patch was written for, and further holders."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@training_flags
def command(host: str, platform: str | None, verbose: bool, as_json: bool, flags: tuple[str, ...]) -> None:
    """List the patches of the platform, the host and the features.

    With FLAGS those that a training with these flags would apply, otherwise those of everything installed.
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
    _print([*own, *hosts, *patches], verbose=verbose, as_json=as_json)


def _of_host(host: HostDeclaration, stages: set[str], kinds: frozenset[str]) -> list[Patch]:
    found = list(host.patches)
    if host.on_demand:
        found += load_object(host.on_demand)(stages, kinds)
    return found


def _print(patches: list[Patch], *, verbose: bool, as_json: bool) -> None:
    if as_json:
        import json

        names = ("target", "owner", "kind", "reason", "versions", "required", "also")
        emit(json.dumps([{name: getattr(p, name) for name in names} for p in patches], indent=2))
        return
    if patches:
        from mindspeed_core.terminal.tables import print_table

        headers = ["target", "owner", "kind", "reason"]
        rows = [[patch.target, patch.owner, patch.kind, patch.reason] for patch in patches]
        if verbose:
            headers += ["versions", "also"]
            rows = [
                [*row, patch.versions or "any", " ".join(patch.also) or "-"]
                for row, patch in zip(rows, patches)
            ]
        print_table(headers, rows)
    owners = len({patch.owner for patch in patches})
    of = f"{owners} owners" if owners > 1 else "one owner"
    emit(f"{len(patches)} patches of {of}" if patches else "no patches")
