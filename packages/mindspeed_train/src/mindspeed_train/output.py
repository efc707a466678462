"""Standard output that may fail at any moment: its reader goes, its terminal closes, its disk fills up."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from mindspeed_core.terminal.foreign_text import clean
from mindspeed_core.terminal.listing import for_terminal


def silence(stream: TextIO) -> None:
    """Send what is written to a stream from now on, and what it still holds, nowhere."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        stream.flush()


def settle_output() -> None:
    """Write out what the standard streams hold; what cannot be written is given up without a word."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            silence(stream)


def say(text: str) -> None:
    """Write a line on standard error past all buffers, for threads that watch; none need read it."""
    shown = clean(text, lines=True) if sys.stderr is None else for_terminal(text, sys.stderr)
    line, descriptor = f"{shown}\n".encode(errors="replace"), 2
    with suppress(OSError):
        while line:
            line = line[os.write(descriptor, line) :]
