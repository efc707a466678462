"""Several trainings that take turns step by step, so that whatever the machine does meets all of them alike.

Each training runs in its own process and waits before every step until it is told to go on; the time of a
turn is taken in that process, from the word to the next wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from mindspeed_core.feature import hookimpl

Part = tuple[Callable[..., None], tuple[Any, ...]]
"""A function that trains, called with its end of a pipe, and the arguments after that."""


class TakeTurns:
    """Outermost wrapper of the step: waits for its turn and reports how long the last one took."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    @hookimpl(wrapper=True)
    def train_step(self) -> Any:
        self.wait()
        return (yield)


class Turns:
    """The child's end: one message per finished turn, one message back to start the next."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.started: float | None = None

    def wait(self) -> None:
        """End the turn and wait for the next."""
        ended = time.perf_counter()
        self.pipe.send(None if self.started is None else ended - self.started)
        self.pipe.recv()
        self.started = time.perf_counter()


def take_turns(parts: Mapping[str, Part], steps: int, warmup: int) -> dict[str, list[float]]:
    """Step the processes round-robin; seconds of every turn after the warm-up, by name."""
    context = get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    for name, (target, extra) in parts.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *extra))
        process.start()
        theirs.close()
        pipes[name], processes = ours, [*processes, process]
    try:
        return _round_robin(pipes, steps, warmup)
    finally:
        for process in processes:
            process.join(timeout=30)
            # A training that was left waiting for its turn would wait for ever.
            process.kill()


def _round_robin(pipes: Mapping[str, Connection], steps: int, warmup: int) -> dict[str, list[float]]:
    try:
        for pipe in pipes.values():
            assert pipe.recv() is None
        taken: dict[str, list[float]] = {name: [] for name in pipes}
        names = list(pipes)
        for step in range(steps):
            # The order rotates so that no process always runs after the same neighbour.
            for offset in range(len(names)):
                name = names[(step + offset) % len(names)]
                pipes[name].send("go")
                seconds = pipes[name].recv()
                if step >= warmup:
                    taken[name].append(seconds)
        for pipe in pipes.values():
            pipe.send("end")
    finally:
        # Closed pipes end the trainings that still wait.
        for pipe in pipes.values():
            pipe.close()
    return taken
