"""``mindspeed-features ops``: the backends of operators, which can run here, and why not the others.

Loads torch, since only a process with torch knows its devices.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mindspeed_kernels.ops import Explanation


@click.command("ops", short_help="List operators: backends, available here or why not.")
@click.argument("names", nargs=-1)
@click.option("--device", default="", help="Only backends for this type of device: cpu, cuda, npu.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(names: tuple[str, ...], device: str, as_json: bool) -> None:
    """List the operators NAMES (all by default) and their backends, the preferred one first.

    Backends are chosen per call. --ops-backend OP=BACKEND and the variable MINDSPEED_OPS force one.
    """
    from mindspeed_kernels.ops import OPERATORS, explain

    unknown = [name for name in names if name not in OPERATORS]
    if unknown:
        raise click.UsageError(f"no operator {', '.join(unknown)}; there are {', '.join(sorted(OPERATORS))}")
    found = [item for name in sorted(names or OPERATORS) for item in explain(name, device)]
    if as_json:
        import json

        click.echo(json.dumps([dataclasses.asdict(item) for item in found], indent=2))
        return
    from mindspeed_megatron.tables import print_table

    headers = ("operator", "backend", "devices", "here", "why not", "bits repeat", "package")
    print_table(headers, [_row(item) for item in found])


def _row(item: Explanation) -> tuple[str, ...]:
    return (
        item.operator,
        item.backend + (" (forced)" if item.forced else ""),
        "all" if "*" in item.devices else " ".join(item.devices),
        "no" if item.missing else "yes",
        item.missing or "-",
        "yes" if item.deterministic else "no",
        item.dist,
    )
