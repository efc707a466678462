"""Standard output that may fail at any moment: its reader goes, its terminal closes, its disk fills up."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from mindspeed_core.terminal.foreign_text import clean


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


def say(text: str, descriptor: int = 2) -> None:
    """Write a line past all buffers, for threads that watch; that nobody reads it is no error."""
    line = f"{clean(text, lines=True)}\n".encode(errors="replace")
    with suppress(OSError):
        while line:
            line = line[os.write(descriptor, line) :]
