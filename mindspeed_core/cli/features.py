"""The program ``mindspeed-features``: what is installed, what flags would switch on, whether it works.

A click group that imports a sub-command's module only when that sub-command runs. Packages add sub-commands
through the entry-point group ``mindspeed.commands``; a broken one fails alone, with its name.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

import click

import mindspeed_core
from mindspeed_core.cli.commands import added_commands, load_added, load_own, origin, suggestion, train_words
from mindspeed_core.discovery.entry_points import COMMANDS as COMMANDS_GROUP
from mindspeed_core.discovery.entry_points import TRAIN_COMMANDS
from mindspeed_core.terminal.errors import TRACEBACK
from mindspeed_core.terminal.program import ExplainedGroup, run_program

PROGRAM = "mindspeed-features"

COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("mindspeed_core.cli.list_command", "List features with their state on this machine."),
    "show": (
        "mindspeed_core.cli.show_command",
        "Show what one feature does, its flags, its conditions.",
    ),
    "plan": ("mindspeed_core.cli.plan_command", "Say what a command line would switch on, and why."),
    "migrate": ("mindspeed-megatron", "Say what becomes of a launch script, flag by flag."),
    "patches": ("mindspeed-megatron", "List patched symbols: by whom and why."),
    "graph": ("mindspeed-megatron", "Draw how features depend on each other."),
    "doctor": ("mindspeed-megatron", "Check versions, devices and common mistakes."),
    "verify": ("mindspeed-testing", "Prove features on this machine."),
    "new": ("mindspeed-testing", "Start a plugin of your own that works as it comes."),
    "completion": ("mindspeed_core.cli.completion_command", "Print the completion script of a shell."),
}
"""Sub-command: its module, or the distribution that brings it, and its line in ``--help``."""


_READING = ("list", "show", "plan", "graph", "patches")
"""Sub-commands that read declarations, print, and end."""


class LazyProgram(ExplainedGroup):
    """A group whose sub-commands are imported when they are used, from here and from entry points."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List own sub-commands in the order of a first visit, then those of other packages."""
        return [*COMMANDS, *sorted(added_commands(COMMANDS_GROUP, COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one sub-command.

        Raises:
            UserError: it belongs to another package and cannot be loaded.
        """
        if cmd_name in COMMANDS:
            return load_own(cmd_name, COMMANDS[cmd_name][0])
        claims = added_commands(COMMANDS_GROUP, COMMANDS).get(cmd_name)
        return None if claims is None else load_added(cmd_name, claims)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the sub-command, or suggest the ones with a similar name."""
        name = str(args[0])
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        if name not in known:
            hint = f"Did you mean mindspeed-train {name}?" if _trains(name) else suggestion(name, known)
            raise click.UsageError(f"No sub-command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list in ``--help``, without importing anything."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])
        added = added_commands(COMMANDS_GROUP, COMMANDS)
        if added:
            with formatter.section("Commands of installed packages"):
                formatter.write_dl([(name, origin(added[name])) for name in sorted(added)])


def _trains(name: str) -> bool:
    """Return whether a command belongs to ``mindspeed-train``."""
    from mindspeed_core.registry import Registry

    return name in (*train_words(Registry.discover()), *added_commands(TRAIN_COMMANDS))


@click.group(
    cls=LazyProgram,
    name=PROGRAM,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(mindspeed_core.__version__, prog_name=PROGRAM)
@click.option(
    TRACEBACK, is_flag=True, expose_value=False, help="Print tracebacks of errors too; it may stand anywhere."
)
def program() -> None:
    """Show what is installed, what a command line would switch on, and whether it works on this machine.

    Exit status: 0 all right, 1 problems were found (each with its remedy), 2 wrong usage.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status; ``argv`` is by default that of the process."""
    words = sys.argv[1:] if argv is None else list(argv)
    pauses = gc.isenabled() and bool(words) and words[0] in _READING
    if pauses:
        # A tenth of their time would be spent on looking for garbage among declarations, which stay.
        gc.disable()
    try:
        return run_program(program, argv, PROGRAM)
    finally:
        if pauses:
            gc.enable()
        if argv is None:
            # The process ends: a tenth of its time would go into a last search for garbage.
            gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
