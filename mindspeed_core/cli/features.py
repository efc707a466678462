"""The program ``mindspeed-features``: what is installed, what flags would switch on, whether it works.

A click group that imports a sub-command's module only when that sub-command runs. Packages add sub-commands
through the entry-point group ``mindspeed.commands``; a broken one fails alone, with its name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

import mindspeed_core
from mindspeed_core.discovery.entry_points import COMMANDS as COMMANDS_GROUP
from mindspeed_core.discovery.entry_points import Source, broken, sources
from mindspeed_core.terminal.errors import EXIT_OK, EXPLAINED, describe, guarded

PROGRAM = "mindspeed-features"

COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("mindspeed_core.cli.list_command", "List features, broken plugins, extension points."),
    "show": ("mindspeed_core.cli.show_command", "Show everything one feature declares."),
    "plan": ("mindspeed_core.cli.plan_command", "Say what a command line would switch on, and why."),
    "patches": ("mindspeed_core.cli.patches_command", "List patched symbols: by whom and why."),
    "graph": ("mindspeed_core.cli.graph_command", "Draw how features depend on each other."),
    "doctor": ("mindspeed_core.cli.doctor.command", "Check versions, devices and common mistakes."),
    "verify": ("mindspeed_core.cli.verify_command", "Prove features on this machine."),
    "new": ("mindspeed_core.cli.new_command", "Start a plugin of your own that works as it comes."),
    "completion": ("mindspeed_core.cli.completion_command", "Print the completion script of a shell."),
}
"""Sub-command: its module (with an attribute ``command``) and its line in ``--help``."""


class ExplainedError(click.ClickException):
    """An explained error inside click: printed as one message, exit status 1."""

    def show(self, file: Any = None) -> None:
        """Print the message on standard error."""
        click.echo(f"error: {self.format_message()}", file=file, err=file is None)


class LazyProgram(click.Group):
    """A group whose sub-commands are imported when they are used, from here and from entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List own sub-commands in the order of a first visit, then those of other packages."""
        return [*COMMANDS, *sorted(_foreign_commands())]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one sub-command.

        Raises:
            ExplainedError: it belongs to another package and cannot be loaded.
        """
        if cmd_name in COMMANDS:
            found: click.Command = import_module(COMMANDS[cmd_name][0]).command
            return found
        claims = _foreign_commands().get(cmd_name)
        return None if claims is None else _load_foreign(cmd_name, claims)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command, or suggest the ones with a similar name."""
        name = str(args[0])
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        if name not in known:
            from difflib import get_close_matches

            close = get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else f" There are: {', '.join(known)}."
            raise click.UsageError(f"No sub-command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list in ``--help``, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])
        foreign = _foreign_commands()
        if foreign:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl([(name, _origin(foreign[name][0])) for name in sorted(foreign)])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; explained errors become one message."""
        try:
            return super().invoke(ctx)
        except EXPLAINED as error:
            raise ExplainedError(describe(error)) from error


def _foreign_commands() -> dict[str, list[Source]]:
    found: dict[str, list[Source]] = {}
    for source in sources(COMMANDS_GROUP):
        if source.name not in COMMANDS:
            found.setdefault(source.name, []).append(source)
    return found


def _origin(source: Source) -> str:
    return f"{source.dist} {source.version}"


def _load_foreign(name: str, claims: list[Source]) -> click.Command:
    if len(claims) > 1:
        raise ExplainedError(
            f"sub-command {name!r} is claimed by {' and by '.join(_origin(source) for source in claims)}; "
            "uninstall one of them"
        )
    source = claims[0]
    try:
        found = source.load()
        if not isinstance(found, click.Command):
            raise TypeError(f"{source.value} is no click command")
    except (Exception, SystemExit) as error:
        record = broken(source, error)
        raise ExplainedError(
            f"sub-command {name!r} of {_origin(source)} cannot be loaded: {record.error}\n"
            f"    -> {record.remedy}"
        ) from error
    return found


@click.group(
    cls=LazyProgram,
    name=PROGRAM,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(mindspeed_core.__version__, prog_name=PROGRAM)
def program() -> None:
    """Show what is installed, what a command line would switch on, and whether it works on this machine.

    Exit status: 0 all right, 1 problems were found (each with its remedy), 2 wrong usage.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status; ``argv`` is by default that of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return guarded(lambda: program.main(args=arguments, prog_name=PROGRAM))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
