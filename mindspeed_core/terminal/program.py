"""Programs made of click commands: one message per error, and the exit status of the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from mindspeed_core.discovery.parts import part_if_installed
from mindspeed_core.terminal.errors import EXPLAINED, describe, guarded, traceback_option, traceback_wanted
from mindspeed_core.terminal.foreign_text import emit


class ExplainedError(click.ClickException):
    """An explained error inside click: printed as one message, exit status 1."""

    def show(self, file: Any = None) -> None:
        """Print the message on standard error."""
        emit(f"error: {self.format_message()}", file=file, err=file is None)


class ExplainedGroup(click.Group):
    """A group whose sub-commands answer an explained error with one message."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; explained errors become one message."""
        try:
            return super().invoke(ctx)
        except EXPLAINED as error:
            if traceback_wanted():
                raise
            raise ExplainedError(describe(error)) from error


def run_command(command: click.Command, arguments: Sequence[str], name: str) -> int:
    """Run a click command and return its exit status: that of ``context.exit``, or an int that it returns.

    Args:
        command: the command or group.
        arguments: its command line.
        name: how usage messages call it.

    Raises:
        click.ClickException: wrong usage.
        KeyboardInterrupt: after Ctrl-C.
    """
    try:
        result = command.main(list(arguments), name, standalone_mode=False)
    except click.Abort as abort:
        if isinstance(abort.__cause__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        emit("Aborted!", err=True)
        return 1
    return result if type(result) is int else 0


def run_program(program: click.Command, argv: Sequence[str] | None, name: str) -> int:
    """Run a program and return its exit status.

    Args:
        program: its command, mostly a group; ``--traceback`` is taken off the command line before it.
        argv: the command line; None takes that of the process.
        name: how usage messages call it.
    """

    def answer() -> int:
        guard = part_if_installed("guard_imports")
        if guard is not None:
            guard()
        try:
            return run_command(program, arguments, name)
        except click.ClickException as error:
            error.show()
            return error.exit_code

    with traceback_option(sys.argv[1:] if argv is None else argv) as arguments:
        return guarded(answer)
