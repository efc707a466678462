"""Errors of the programs: one message, exit status 1, a traceback only where it is wanted.

Shared by ``mindspeed-features`` and ``mindspeed-train``; knows nothing about click or argparse.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from mindspeed_core.errors import PatchError, SessionError, UserError
from mindspeed_core.feature import DeclarationError
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_core.terminal.listing import print_message

EXIT_OK = 0
EXIT_PROBLEMS = 1
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
"""The status of a program that SIGPIPE ended: whoever read its output, such as ``head``, had enough."""

TRACEBACK = "--traceback"
TRACEBACK_VARIABLE = "MINDSPEED_TRACEBACK"
"""Set, also in worker processes, while tracebacks of explained errors are printed too."""

EXPLAINED = (UserError, DeclarationError, PatchError, SessionError)
"""Errors whose message already says what is wrong and what to do; a traceback would only hide it."""


@contextmanager
def traceback_option(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Take ``--traceback`` off a command line, and print tracebacks of explained errors where it was there.

    Both programs own the name, wherever it stands.
    """
    kept = [argument for argument in arguments if argument != TRACEBACK]
    before = os.environ.get(TRACEBACK_VARIABLE)
    if len(kept) < len(arguments):
        os.environ[TRACEBACK_VARIABLE] = "1"
    try:
        yield kept
    finally:
        if before is None:
            os.environ.pop(TRACEBACK_VARIABLE, None)


def traceback_wanted() -> bool:
    """Return whether tracebacks of explained errors are printed."""
    return bool(os.environ.get(TRACEBACK_VARIABLE))


def exit_status(error: BaseException) -> int:
    """Return the exit status of a program that an error ends."""
    return error.exit_status if isinstance(error, UserError) else EXIT_PROBLEMS


def describe(error: BaseException) -> str:
    """Return the message of an explained error, with the notes that name feature and stage."""
    lines = [str(error) or type(error).__name__, *getattr(error, "__notes__", ())]
    return "\n".join(lines)


def print_error(error: BaseException) -> None:
    """Print an error on standard error: the message of an explained one, the traceback of any other.

    Python 3.10 does not print ``__notes__`` with a traceback, so they follow it there.
    """
    # Nobody may read standard error any more.
    with suppress(OSError, ValueError):
        if isinstance(error, EXPLAINED) and not traceback_wanted():
            print_message(f"error: {describe(error)}")
            return
        from traceback import format_exception

        lines = format_exception(type(error), error, error.__traceback__)
        emit("".join(lines).rstrip("\n"), err=True)
        if sys.version_info < (3, 11):
            for note in getattr(error, "__notes__", ()):
                emit(note, err=True)


def guarded(program: Callable[[], int | None]) -> int:
    """Run a program and return its exit status.

    That is its result (None means 0), 1 after an exception, which is printed (of wrong usage 2), 130 after
    Ctrl-C, or 141 when nobody reads its output any more.
    """
    try:
        status = program() or EXIT_OK
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        if "torch" not in sys.modules and any(name.startswith("torch.") for name in sys.modules):
            # Its import was interrupted: the end of the interpreter would crash in the half that is there.
            os._exit(EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except SystemExit as end:
        if isinstance(end.code, str):
            emit(end.code, err=True)
            return EXIT_PROBLEMS
        # click ends so when its output cannot be written.
        return _discard() or end.code or EXIT_OK
    except Exception as error:
        if isinstance(error, BrokenPipeError) and (unread := _discard()):
            return unread
        print_error(error)
        return exit_status(error)
    return status


def _discard() -> int:
    """Return 141 where the reader of standard output has gone; what is still buffered goes nowhere then."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return EXIT_OK
    poll = select.poll()
    poll.register(descriptor, 0)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
        return EXIT_OK
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return EXIT_UNREAD
