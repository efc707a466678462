"""Ctrl-C while a program starts: it ends at once, without a traceback.

Python raises ``KeyboardInterrupt`` wherever it is, and an import of torch that was interrupted leaves half
of it behind: whatever cleans up then imports it again, or crashes inside it. A program that starts has
nothing to clean up, so it dies of the signal, as it does of SIGTERM.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once(*, for_good: bool = False) -> Iterator[None]:
    """Let Ctrl-C end this process at once, also inside imports and calls that never return to Python.

    Nothing changes where the signal is ignored, where somebody handles it, or outside the main thread.

    Args:
        for_good: not only in the ``with`` block, for a program that ends after it.
    """
    if not _is_default():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if not for_good:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_again() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` from now on, for commands that tidy up after it."""
    if threading.current_thread() is threading.main_thread() and _handler() is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_default() -> bool:
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and _handler() is signal.default_int_handler


def _handler() -> object:
    return signal.getsignal(signal.SIGINT)
