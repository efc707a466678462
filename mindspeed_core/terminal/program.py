"""Programs made of click commands: one message per error, and the exit status of the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click

from mindspeed_core.discovery.parts import part_if_installed
from mindspeed_core.terminal.errors import (
    EXPLAINED,
    describe,
    exit_status,
    guarded,
    traceback_option,
    traceback_wanted,
)
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import print_message


def print_click_error(error: click.ClickException, stream: TextIO | None = None) -> None:
    """Print an error of click, on standard error by default; of wrong usage with the way to the help."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    way_out = "" if context is None else f"\n    -> {context.command_path} --help"
    print_message(f"error: {error.format_message()}{way_out}", stream)


class ExplainedError(click.ClickException):
    """Explained error inside click, printed as one message."""

    def __init__(self, error: BaseException) -> None:
        """Take message and exit status of an explained error."""
        super().__init__(describe(error))
        self.exit_code = exit_status(error)  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Print the message, on standard error by default."""
        print_click_error(self, file)


class ExplainedGroup(click.Group):
    """A group whose sub-commands answer an explained error with one message."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; explained errors become one message."""
        try:
            return super().invoke(ctx)
        except EXPLAINED as error:
            if traceback_wanted():
                raise
            raise ExplainedError(error) from error


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
            print_click_error(error)
            return error.exit_code

    with traceback_option(sys.argv[1:] if argv is None else argv) as arguments:
        return guarded(answer)
