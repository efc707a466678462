"""``mindspeed-features new PLUGIN``: starts a plugin of one's own."""

from __future__ import annotations

from pathlib import Path

import click

from mindspeed_core.terminal.foreign_text import emit


@click.command("new", short_help="Start a plugin of your own that works as it comes.")
@click.argument("plugin")
@click.option(
    "--path",
    "parent",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("."),
    help="The directory in which the plugin's own directory is made; by default this one.",
)
def command(plugin: str, parent: Path) -> None:
    """Start a plugin: a package with one working feature, its page, its tests, its proof and its tasks.

    PLUGIN is the distribution's name, for instance acme-losses. Nothing is ever overwritten.
    """
    from mindspeed_testing.scaffold import create_plugin

    written = create_plugin(plugin, parent)
    target = parent / plugin
    for path in written:
        emit(f"  {path.relative_to(parent)}")
    emit("\nNext:")
    emit(f"  pip install -e {target}")
    emit(f"  mindspeed-features show {plugin}-loss-average")
    emit(f"  mindspeed-features verify {plugin}-loss-average")
    emit(f"  pytest {target}")
    emit(f"  pytest --contract {plugin}")
