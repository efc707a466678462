"""``mindspeed-features plan``: what training flags would switch on, or everything that is wrong with them.

The same registry, flags and resolver that a training uses, without torch.
"""

from __future__ import annotations

import json
from typing import Any

import click

from mindspeed_core.errors import UserError
from mindspeed_core.resolver.plan import PlanError
from mindspeed_core.terminal.errors import EXIT_PROBLEMS
from mindspeed_core.terminal.training_flags import (
    UNPROCESSED_FLAGS,
    Planned,
    host_option,
    make_plan,
    platform_option,
    training_flags,
)


@click.command(
    "plan", short_help="Say what a command line would switch on.", context_settings=UNPROCESSED_FLAGS
)
@host_option
@platform_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@training_flags
@click.pass_context
def command(
    context: click.Context, host: str, platform: str | None, as_json: bool, flags: tuple[str, ...]
) -> None:
    """Say what a training with these FLAGS would switch on, in which order and why.

    Exit status 1 with every problem (flag, reason, remedy) when the flags do not go together.

    \b
    mindspeed-features plan -- --num-layers 4 --context-parallel-size 2
    """
    from mindspeed_core.registry import Registry

    try:
        planned = make_plan(Registry.discover(), flags, host=host, platform=platform)
    except PlanError as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "problems": [_problem(p) for p in error.problems]}, indent=2))
        else:
            click.echo(str(error))
        context.exit(EXIT_PROBLEMS)
    except UserError as error:
        if not as_json:
            raise
        click.echo(
            json.dumps({"ok": False, "problems": [{"code": "E-USAGE", "reason": str(error)}]}, indent=2)
        )
        context.exit(EXIT_PROBLEMS)
    if as_json:
        click.echo(json.dumps(_as_json(planned), indent=2, default=str))
    else:
        show(planned)


def _problem(problem: Any) -> dict[str, str]:
    return {name: getattr(problem, name) for name in ("code", "feature", "flag", "reason", "remedy")}


def _chosen_by_presets(planned: Planned) -> dict[str, dict[str, Any]]:
    return {
        dest: {"value": getattr(planned.args, dest, None), "from": origin}
        for dest, origin in sorted(planned.provenance.items())
        if origin.startswith("preset")
    }


def _as_json(planned: Planned) -> dict[str, Any]:
    return {
        "ok": True,
        **planned.plan.as_dict(),
        "platform_reason": planned.platform_reason,
        "presets": _chosen_by_presets(planned),
    }


def show(planned: Planned) -> None:
    """Print a plan for a reader."""
    from mindspeed_core.terminal.tables import print_table

    plan = planned.plan
    click.echo(f"host {plan.host}, optimization level {plan.level}")
    click.echo(planned.platform_reason)
    if plan.features:
        rows = [
            (
                index,
                feature.name,
                feature.family,
                feature.level,
                f"{feature.dist} {feature.version}",
                feature.why,
            )
            for index, feature in enumerate(plan.features, start=1)
        ]
        click.echo()
        print_table(("#", "active", "family", "level", "package", "why"), rows)
    else:
        click.echo("no feature is active")
    if plan.held_back:
        click.echo("\nheld back:")
        for held in plan.held_back:
            flag = f" ({held.flag})" if held.flag else ""
            click.echo(f"  {held.name}{flag}: {held.reason}")
            if held.remedy:
                click.echo(f"    -> {held.remedy}")
    if plan.slots:
        click.echo("\nslots:")
        for slot, feature in sorted(plan.slots.items()):
            click.echo(f"  {slot}: {feature}")
    if plan.patches:
        click.echo("\npatches:")
        for patch in plan.patches:
            click.echo(f"  {patch.kind} {patch.target} by {patch.owner}: {patch.reason}")
    presets = _chosen_by_presets(planned)
    if presets:
        click.echo("\nset by presets:")
        for dest, chosen in presets.items():
            click.echo(f"  {dest} = {chosen['value']} ({chosen['from']})")
    click.echo(f"\ndigest {plan.digest}")
