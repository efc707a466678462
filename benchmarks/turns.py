"""Several trainings that take turns, so that whatever the machine does meets all of them alike.

Each training is a program of its own, whatever its interpreter, and waits before every turn until it is told
to go on; the time of each step is taken in that program, from its beginning to that of the next. Processor
time stands beside wall time, since other work on the machine stretches only the latter.

The program's side is ``python turns.py DESCRIPTOR STEPS_PER_TURN MODULE:FUNCTION JSON``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

LONGEST_TURN = 300.0
"""Seconds after which a program that says nothing is given up."""


class Seconds(NamedTuple):
    """Duration of a turn."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Part:
    """One training.

    Attributes:
        function: ``"module:name"``, called with `Turns` and the arguments in the program of its own.
        arguments: what JSON can carry.
        interpreter: the Python that runs it.
        environment: variables beside those of this process.
    """

    function: str
    arguments: Sequence[Any]
    interpreter: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)


class Turns:
    """The program's end: the seconds of each step go out when a turn is over, a word to go on comes back."""

    def __init__(self, pipe: Connection, steps_per_turn: int = 1) -> None:
        """Hand over before the first step and before every step whose number ``steps_per_turn`` divides."""
        self.pipe = pipe
        self.steps_per_turn = steps_per_turn
        self.step = 0
        self.taken: list[Seconds] = []
        self.started: Seconds | None = None

    def wait(self) -> None:
        """Begin a step: wait for the next turn where this one is over."""
        self._ended()
        self.step += 1
        if self.step == 1 or self.step % self.steps_per_turn == 0:
            self._send(last=False)
            self.pipe.recv_bytes()
        self.started = now()

    def finish(self) -> None:
        """End the last step."""
        self._ended()
        self._send(last=True)

    def _ended(self) -> None:
        if self.started is not None:
            self.taken.append(since(self.started))
            self.started = None

    def _send(self, last: bool) -> None:
        self.pipe.send_bytes(json.dumps({"taken": self.taken, "last": last}).encode())
        self.taken = []


def now() -> Seconds:
    """Wall and CPU time of this process."""
    return Seconds(time.perf_counter(), time.process_time())


def since(begin: Seconds) -> Seconds:
    """Return the time since `now` gave ``begin``."""
    ended = now()
    return Seconds(ended.wall - begin.wall, ended.cpu - begin.cpu)


def take_turns(
    parts: Mapping[str, Part], warmup: int, *, steps_per_turn: int = 1
) -> dict[str, list[Seconds]]:
    """Let the programs train in turns to their ends; the seconds of every step after the warm-up.

    Raises:
        SystemExit: a program ended early or was silent for too long; its own message is on standard error.
    """
    programs: list[subprocess.Popen[bytes]] = []
    pipes: dict[str, Connection] = {}
    try:
        for name, part in parts.items():
            pipes[name], theirs = Pipe()
            programs.append(_start(part, theirs, steps_per_turn))
            theirs.close()
        taken = _round_robin(pipes)
        for program in programs:
            program.wait(LONGEST_TURN)
        return {name: steps[warmup:] for name, steps in taken.items()}
    finally:
        for pipe in pipes.values():
            pipe.close()
        for program in programs:
            program.kill()
            program.wait()


def _start(part: Part, pipe: Connection, steps_per_turn: int) -> subprocess.Popen[bytes]:
    what = (str(pipe.fileno()), str(steps_per_turn), part.function, json.dumps(list(part.arguments)))
    return subprocess.Popen(
        [part.interpreter, "-W", "ignore", __file__, *what],
        pass_fds=(pipe.fileno(),),
        env={**os.environ, **part.environment},
    )


def _round_robin(pipes: Mapping[str, Connection]) -> dict[str, list[Seconds]]:
    for name, pipe in pipes.items():
        _answer(name, pipe)
    taken: dict[str, list[Seconds]] = {name: [] for name in pipes}
    names = list(pipes)
    training = set(names)
    while training:
        for name in (each for each in names if each in training):
            pipes[name].send_bytes(b"go")
            answer = _answer(name, pipes[name])
            taken[name] += [Seconds(*pair) for pair in answer["taken"]]
            if answer["last"]:
                training.remove(name)
        # The order rotates so that no program always runs after the same neighbour.
        names = [*names[1:], names[0]]
    return taken


def _answer(name: str, pipe: Connection) -> Any:
    if not pipe.poll(LONGEST_TURN):
        raise SystemExit(f"{name}: silent for {LONGEST_TURN:g} s")
    try:
        return json.loads(pipe.recv_bytes())
    except EOFError:
        raise SystemExit(f"{name}: ended before its last turn") from None


def main() -> None:
    """Run one part in this process."""
    descriptor, steps_per_turn, path, arguments = sys.argv[1:5]
    module, _, name = path.partition(":")
    function: Callable[..., None] = getattr(import_module(module), name)
    function(Turns(Connection(int(descriptor)), int(steps_per_turn)), *json.loads(arguments))


if __name__ == "__main__":
    main()
