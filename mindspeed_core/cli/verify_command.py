"""``mindspeed-features verify``: runs the proofs that features carry, on this machine.

Each scenario trains a small model twice, with and without the feature, and compares numbers and costs.
"""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.cli.errors import EXIT_PROBLEMS
from mindspeed_core.cli.feature_names import complete_features, find_feature

if TYPE_CHECKING:
    from mindspeed_core.registry import FeatureRecord


@click.command("verify", short_help="Prove features on this machine.")
@click.argument("names", nargs=-1, shell_complete=complete_features)
@click.option("--all", "everything", is_flag=True, help="Every installed feature.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, names: tuple[str, ...], everything: bool, as_json: bool) -> None:
    """Run the proofs of the features NAMES: a short training with and without each, compared.

    Exit status 1 when a proof fails, and when a feature has none.
    """
    from mindspeed_core.registry import Registry

    if everything == bool(names):
        raise click.UsageError("name features, or give --all")
    registry = Registry.discover()
    records = (
        list(registry.features.values()) if everything else [find_feature(registry, name) for name in names]
    )
    results = [result for record in records for result in _prove(record, quiet=as_json)]
    failed = any(not result["passed"] for result in results)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "results": results}, indent=2, default=str))
    else:
        _print(results)
    context.exit(EXIT_PROBLEMS if failed else 0)
