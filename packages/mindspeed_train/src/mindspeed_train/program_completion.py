"""Shell completion of ``mindspeed-train``: its commands, every installed flag, and the values of choices.

The program reads its flags itself, so that click knows none of them: here they are declared to click, which
completes. Imports neither torch nor megatron-core.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from mindspeed_core.cli.completion_command import SHELLS, completion_script
from mindspeed_core.errors import UsageError
from mindspeed_core.terminal.foreign_text import emit

if TYPE_CHECKING:
    from mindspeed_core.feature import Flag
    from mindspeed_core.flags.flag_set import FlagSet

VARIABLE = "_MINDSPEED_TRAIN_COMPLETE"
_PATHS = ("path", "dir", "load", "save", "model", "prefix", "file")
"""Last words of the names of flags whose values are files or folders."""


class _Commands(click.Group):
    """A group that offers commands by name and imports one when words behind it are completed."""

    def __init__(
        self, flags: FlagSet, commands: Mapping[str, str], load: Callable[[str], click.Command]
    ) -> None:
        options = {entry.flag.name: _option(entry.flag) for entry in flags.entries}
        super().__init__("mindspeed-train", params=list(options.values()))
        self._commands = commands
        self._load = load

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the commands of the host and of packages."""
        return list(self._commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command for the list, without importing it."""
        known = cmd_name in self._commands
        return click.Command(cmd_name, short_help=self._commands[cmd_name]) if known else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Import the command whose words are completed; other words are values of flags."""
        if args[0] not in self._commands:
            return None, None, []
        return args[0], self._load(args[0]), args[1:]


def complete(
    program: str, flags: FlagSet, commands: Mapping[str, str], load: Callable[[str], click.Command]
) -> int:
    """Answer the shell that asks through the environment variable; the exit status.

    Args:
        program: name under which the shell knows the program.
        flags: of everything that is installed.
        commands: each sub-command with what it does.
        load: imports one of them.
    """
    from click.shell_completion import shell_complete

    group = _Commands(flags, commands, load)
    return shell_complete(group, {}, program, VARIABLE, os.environ[VARIABLE])


def print_script(program: str, shell: str) -> int:
    """Print the completion script of a shell.

    Raises:
        UsageError: completion exists for other shells only.
    """
    if shell not in SHELLS:
        raise UsageError(f"completion {shell or 'SHELL'}: name one of {', '.join(SHELLS)}")
    emit(completion_script(click.Group(), program, VARIABLE, shell))
    return 0


def _option(flag: Flag) -> click.Option:
    """Declare a flag to click: completion asks for its values and its help."""
    kind: click.ParamType = click.STRING
    if flag.choices:
        kind = click.Choice([str(choice) for choice in flag.choices])
    elif flag.type is str and flag.dest.rpartition("_")[2] in _PATHS:
        kind = click.Path()
    return click.Option(
        list(flag.options), type=None if flag.is_switch else kind, is_flag=flag.is_switch, help=flag.help
    )
