"""A terminal of a given width: runs a program in it and keeps the lines that remain on its screen.

``docs/reading.py`` draws them. Known are the sequences that our programs write: colours, a return to the
first column, erasing a line or what follows, and moving up.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

_PIECE = re.compile(r"(\x1b\[[?\d;]*[A-Za-z]|\r|\n|\x08)")


class Screen:
    """Lines of cells, each a character and the colour in which it stands.

    Attributes:
        columns: width, after which a line goes on in the next one.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._lines: list[list[tuple[str, str]]] = [[]]
        self._row = self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        """Write text with its control sequences."""
        for piece in _PIECE.split(text):
            if piece == "\r":
                self._column = 0
            elif piece == "\n":
                self._down()
            elif piece == "\x08":
                self._column = max(0, self._column - 1)
            elif piece.startswith("\x1b["):
                self._control(piece[-1], piece[2:-1])
            else:
                for character in piece:
                    self._put(character)

    def lines(self) -> list[str]:
        """Return the lines with their colours as escape sequences, without empty ones at the end."""
        found = ["".join(_runs(line)) for line in self._lines]
        while found and not found[-1].strip():
            found.pop()
        return found

    def _down(self) -> None:
        self._row, self._column = self._row + 1, 0
        while self._row >= len(self._lines):
            self._lines.append([])

    def _put(self, character: str) -> None:
        if self._column >= self.columns:
            self._down()
        line = self._lines[self._row]
        line.extend([(" ", "")] * (self._column + 1 - len(line)))
        line[self._column] = (character, self._style)
        self._column += 1

    def _control(self, kind: str, numbers: str) -> None:
        if kind == "m":
            self._style = "" if numbers in ("", "0", "39", "22") else numbers
        elif kind == "K":
            line = self._lines[self._row]
            del line[0 if numbers in ("1", "2") else self._column :]
        elif kind == "J":
            del self._lines[self._row][self._column :]
            del self._lines[self._row + 1 :]
        elif kind == "A":
            self._row = max(0, self._row - int(numbers or 1))
        elif kind == "G":
            self._column = int(numbers or 1) - 1


def _runs(line: Sequence[tuple[str, str]]) -> list[str]:
    """Return the text of a line, an escape sequence before each change of colour."""
    runs, style = [], ""
    for character, wanted in line:
        if wanted != style:
            runs.append("\x1b[0m" + (f"\x1b[{wanted}m" if wanted else ""))
            style = wanted
        runs.append(character)
    return [*runs, "\x1b[0m"] if style else runs


def shown(command: Sequence[str], columns: int, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """Return what a terminal shows after a command has ended.

    Args:
        command: program and arguments.
        columns: width of the terminal.
        folder: where it runs.
        environment: variables beside those of this process.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    settings = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), **environment}
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, cwd=folder, env=settings, close_fds=True
    ) as program:
        os.close(follower)
        written = b""
        try:
            while part := os.read(leader, 65536):
                written += part
        except OSError:
            # Linux says so when the program has closed the other end.
            pass
        program.wait()
    os.close(leader)
    screen = Screen(columns)
    screen.feed(written.decode("utf-8", "replace"))
    return screen.lines()
