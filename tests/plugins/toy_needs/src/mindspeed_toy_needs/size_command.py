"""``mindspeed-features toy-size``: a tool of a plugin's own that needs no process group and no torch."""

from __future__ import annotations

import click

from mindspeed_core.flags.flag_set import flag_set
from mindspeed_core.registry import Registry
from mindspeed_core.resolver.plan import PlanError


@click.command("toy-size", context_settings={"ignore_unknown_options": True})
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(flags: tuple[str, ...]) -> None:
    """Estimate the parameters of the model that FLAGS describe: 12 h^2 per layer."""
    parsed = flag_set(Registry.discover(), "standalone").parse(list(flags))
    if parsed.problems:
        raise PlanError(parsed.problems)
    size = 12 * parsed.args.num_layers * parsed.args.hidden_size**2
    click.echo(f"{size} parameters in {parsed.args.num_layers} layers")
