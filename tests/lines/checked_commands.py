"""Check a stretch of generated command lines in a process with little memory; prints what is wrong as JSON.

A process of its own: its memory is limited, and a check that hangs in code that no signal reaches ends it
with the stacks of all threads.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from command_lines import CommandLines, Line, shrunk, tokens
from explained import complaint

from mindspeed_core import Registry, check
from mindspeed_core.errors import ArgumentError
from mindspeed_core.flags.flag_set import FlagSet, flag_set
from mindspeed_core.resolver.plan import Problem
from mindspeed_train.launch.start import requested_launch

SECONDS = 20
"""The longest check of one command line."""
_MEMORY = 4 * 2**30
"""Bytes that checks may take beyond those that the imports have taken."""


class TooSlow(BaseException):
    """A check took longer than `SECONDS`; no handler of ordinary exceptions sees it."""


def _too_slow(*_: Any) -> None:
    raise TooSlow


def found(line: Line, world_size: int, registry: Registry, known: FlagSet) -> str:
    """Return what is wrong with the answer to a command line; nothing where all is well."""
    words = tokens(line)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        problems = _answer(words, world_size, registry)
        texts = [(problem, str(problem)) for problem in problems]
        # What a terminal in UTF-8 cannot show would end a program that prints it.
        "".join(text for _, text in texts).encode()
    except TooSlow:
        return f"takes longer than {SECONDS} s"
    except BaseException:
        return traceback.format_exc(limit=-3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    for problem, text in texts:
        wrong = complaint(problem, words, known)
        if wrong:
            return f"{wrong}: {text}"
    return ""


def _answer(words: list[str], world_size: int, registry: Registry) -> tuple[Problem, ...]:
    try:
        requested_launch(words)
    except ArgumentError as error:
        return (Problem("E-ARGUMENT", error.wrong, error.remedy, flag=error.flag),)
    return check(words, world_size=world_size, registry=registry).problems


def main() -> None:
    """Check the lines ``first`` to ``last`` of a seed."""
    parser = argparse.ArgumentParser()
    for name in ("first", "last", "seed"):
        parser.add_argument(name, type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    registry = Registry.discover()
    known = flag_set(registry)
    lines = CommandLines((entry.flag for entry in known.entries), options.folder, options.seed)
    # What a check imports at first is not the doing of a command line.
    check(tokens(lines.sound()), registry=registry)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY,) * 2)
    signal.signal(signal.SIGALRM, _too_slow)
    counts = {"refused": 0, "accepted": 0}
    wrong = []
    for index in range(options.first, options.last):
        line, world_size = lines.line(index), lines.world_size(index)
        text = found(line, world_size, registry, known)
        if text:
            fails = _failing(world_size, registry, known)
            line = shrunk(line, fails) if "longer than" not in text else line
            wrong.append(
                {"index": index, "line": tokens(line), "found": found(line, world_size, registry, known)}
            )
        elif check(tokens(line), world_size=world_size, registry=registry).ok:
            counts["accepted"] += 1
        else:
            counts["refused"] += 1
    json.dump({"wrong": wrong, **counts}, sys.stdout)


def _failing(world_size: int, registry: Registry, known: FlagSet) -> Callable[[Line], bool]:
    return lambda line: bool(found(line, world_size, registry, known))


if __name__ == "__main__":
    main()
