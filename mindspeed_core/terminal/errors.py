"""Errors of the programs: one message, exit status 1, no traceback.

Shared by ``mindspeed-features`` and ``mindspeed-train``; knows nothing about click or argparse.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from mindspeed_core.errors import PatchError, SessionError, UserError
from mindspeed_core.feature import DeclarationError

EXIT_OK = 0
EXIT_PROBLEMS = 1
EXIT_INTERRUPTED = 130

EXPLAINED = (UserError, DeclarationError, PatchError, SessionError)
"""Errors whose message already says what is wrong and what to do; a traceback would only hide it."""


def describe(error: BaseException) -> str:
    """Return the message of an explained error, with the notes that name feature and stage."""
    lines = [str(error) or type(error).__name__, *getattr(error, "__notes__", ())]
    return "\n".join(lines)


def print_error(error: BaseException) -> None:
    """Print an error on standard error: the message of an explained one, the traceback of any other.

    Python 3.10 does not print ``__notes__`` with a traceback, so they follow it there.
    """
    if isinstance(error, EXPLAINED):
        print(f"error: {describe(error)}", file=sys.stderr, flush=True)
        return
    traceback.print_exception(type(error), error, error.__traceback__)
    if sys.version_info < (3, 11):
        for note in getattr(error, "__notes__", ()):
            print(note, file=sys.stderr)
    sys.stderr.flush()


def guarded(program: Callable[[], int | None]) -> int:
    """Run a program and return its exit status.

    That is its result (None means 0), 1 after an exception, which is printed, or 130 after Ctrl-C.
    """
    try:
        return program() or EXIT_OK
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        print_error(error)
        return EXIT_PROBLEMS
