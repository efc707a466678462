"""A long training in several processes after each other, and the trend of what its processes hold.

Three numbers are sampled between two checkpoints, when the first is in its place, and not in the first part
of a process, when caches fill. A leak raises the bytes that the C library has handed out and not got back,
or the number of Python's small blocks, which it takes from memory of its own. Anonymous memory also holds the
gaps between them.

One block in fifty steps is seen where the caches of libraries stand still: those of the C library and of
c10d by `ENVIRONMENT`, that of numpy because it is filled at the start of a process.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_core.feature import Feature, hookimpl
from mindspeed_testing.worlds import run_world
from mindspeed_train.interface import Saver

if TYPE_CHECKING:
    from mindspeed_core.run import Run

ENVIRONMENT = {
    # Freed blocks that a thread keeps for itself would count as handed out.
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    # Each of 2,000 places for the last collectives keeps room for the longest names that it has held.
    "TORCH_FR_BUFFER_SIZE": "64",
}
"""Variables of the program that calls `soak`, from before its first world on."""
WARM_UP = 0.3
"""The share of a process's samples that are left out of a trend."""
SMALLEST_BLOCK = 32
"""Bytes that the C library takes from its memory for the smallest block."""


@dataclass(frozen=True)
class Sample:
    """State of a process before a step.

    Attributes:
        step: its number.
        memory: bytes that the C library has handed out.
        blocks: number of Python's small blocks.
        resident: bytes of anonymous memory.
        descriptors: number of open files.
        threads: number of threads.
    """

    step: int
    memory: int
    blocks: int
    resident: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Trend:
    """A straight line through samples, by least squares, with a level for each process.

    Attributes:
        slope: bytes, or blocks, per step.
        error: its standard error, with neighbouring samples counted as far as they differ.
        level: mean bytes, or blocks.
    """

    slope: float
    error: float
    level: float

    def is_flat(self, errors: float = 3.0) -> bool:
        """Return whether there is no growth, within so many standard errors."""
        return self.slope <= errors * self.error

    def excludes(self, slope: float, errors: float = 3.0) -> bool:
        """Return whether a growth of ``slope`` per step is that many standard errors away."""
        return self.slope + errors * self.error < slope

    def share_after(self, steps: int) -> float:
        """Return the growth after so many steps as a share of the level."""
        return self.slope * steps / self.level


class Sampler(Feature):
    """Samples a process every ``every`` steps."""

    name = "soak-sampler"
    summary = "counts memory, descriptors and threads of its process"

    def __init__(self, every: int, at: int, most: int) -> None:
        """Sample before the steps whose number leaves the remainder ``at``, ``most`` times."""
        self._every, self._at = every, at
        # Samples that took memory would be a growth of their own.
        self._numbers = array("q", bytes(8 * len(fields(Sample)) * most))
        self._count = 0

    @property
    def samples(self) -> list[Sample]:
        """Return what was sampled."""
        size = len(fields(Sample))
        return [Sample(*self._numbers[at * size : (at + 1) * size]) for at in range(self._count)]

    @hookimpl(wrapper=True)
    def train_step(self, run: Run) -> Iterator[None]:
        """Sample, then train."""
        if run.iteration % self._every == self._at:
            # On a slow machine a checkpoint may still be on its way, which is no leak.
            run.session.state(Saver).poll(blocking=True)
            size = len(fields(Sample))
            begin = self._count * size
            self._numbers[begin : begin + size] = array("q", astuple(_sample(run.iteration)))
            self._count += 1
        return (yield)


def soak(
    flags: Sequence[str],
    folder: Path,
    *,
    processes: int,
    steps: int,
    restarts: int,
    every: int,
    modes: Sequence[Sequence[str]],
    timeout: float = 3600.0,
) -> list[list[list[Sample]]]:
    """Train, and end and start all processes several times on the way.

    Args:
        flags: of ``mindspeed-train``, without ``--train-iters``, ``--save``, ``--load``, ``--save-interval``
            and ``--run-dir``.
        folder: takes the run's files.
        processes: ranks.
        steps: of the whole training, divisible by ``restarts + 1`` and that again by ``every``.
        restarts: how often all processes are replaced.
        every: steps between two checkpoints; samples are taken late between them.
        modes: further flags of each attempt, which take turns.
        timeout: seconds for one attempt.

    Returns:
        The samples of each rank of each attempt: ``[attempt][rank]``.
    """
    length = steps // (restarts + 1)
    save = str(folder / "checkpoints")
    own = ["--train-iters", str(steps), "--save", save, "--load", save, "--save-interval", str(every)]
    own += ["--run-dir", str(folder / "run"), "--exit-interval", str(length), "--keep-last-n", "2"]
    return [
        run_world(
            f"{__name__}:train_attempt",
            processes,
            [*flags, *own, *modes[attempt % len(modes)]],
            every,
            length // every,
            timeout=timeout,
        )
        for attempt in range(restarts + 1)
    ]


def train_attempt(flags: Sequence[str], every: int, most: int) -> list[Sample]:
    """Train in this rank until the flags end it; return its samples, at most ``most``."""
    from mindspeed_core.activation import activate
    from mindspeed_core.discovery.entry_points import load_object

    sampler = Sampler(every, every - every // 4, most)
    _fill_array_cache()
    with activate(flags, extra_plugins=[sampler], host="standalone") as session:
        load_object(session.host.train)(session)
    return sampler.samples


def warmed_up(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples of a process behind its first part."""
    return samples[int(len(samples) * WARM_UP) :]


def held_throughout(samples: Sequence[Sample], of: str) -> tuple[int, int]:
    """Return the smallest number of ``descriptors`` or ``threads`` in each half of a process, warmed up.

    What a process keeps is in all later samples. A thread that has ended is listed by the system for a moment
    after it was joined, and one that a library starts for one task may run when a sample is due.
    """
    numbers = [getattr(sample, of) for sample in warmed_up(samples)]
    middle = len(numbers) // 2
    return min(numbers[:middle]), min(numbers[middle:])


def fit(processes: Sequence[Sequence[Sample]], of: str = "memory") -> Trend:
    """Fit a common slope through a number of several processes: ``memory``, ``blocks`` or ``resident``.

    Raises:
        ValueError: there are too few samples.
    """
    rows: list[tuple[float, float]] = []
    memory: list[int] = []
    for samples in map(warmed_up, processes):
        if len(samples) < 3:
            raise ValueError(
                f"{len(samples)} samples of a process behind its first part; at least 3 are needed"
            )
        middle = sum(sample.step for sample in samples) / len(samples)
        values = [getattr(sample, of) for sample in samples]
        level = sum(values) / len(values)
        rows += [(sample.step - middle, value - level) for sample, value in zip(samples, values)]
        memory += values
    spread = sum(x * x for x, _ in rows)
    slope = sum(x * y for x, y in rows) / spread
    rest = [y - slope * x for x, y in rows]
    free = len(rows) - len(processes) - 1
    variance = sum(r * r for r in rest) / free
    # Memory that is kept for a while shows in several samples: they count as fewer.
    alike = sum(a * b for a, b in itertools.pairwise(rest)) / (sum(r * r for r in rest) or 1.0)
    alike = min(max(alike, 0.0), 0.99)
    error = math.sqrt(variance / spread * (1 + alike) / (1 - alike))
    return Trend(slope, error, sum(memory) / len(memory))


def as_json(processes: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Return the trends of some processes, and the numbers of descriptors and threads that they kept."""
    trends = {of: fit(processes, of) for of in ("memory", "blocks", "resident")}
    behind = [sample for samples in processes for sample in warmed_up(samples)]
    return {
        **{
            of: {name: round(value, 4) for name, value in asdict(trend).items()}
            for of, trend in trends.items()
        },
        "samples": len(behind),
        **{
            of: sorted({number for samples in processes for number in held_throughout(samples, of)})
            for of in ("descriptors", "threads")
        },
    }


def _sample(step: int) -> Sample:
    handed_out, blocks = _handed_out(), sys.getallocatedblocks()
    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return Sample(step, handed_out, blocks, memory * 1024, descriptors, threads)


def _fill_array_cache() -> None:
    """Have numpy keep as much memory of small arrays as it ever does: up to 7 blocks of each length."""
    for length in range(1, 1024):
        held = [np.empty(length, np.uint8) for _ in range(7)]
        del held


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc, from 2.33 on."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _handed_out() -> int:
    """Return the bytes that the C library has handed out, of all arenas and in mappings of their own."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _MallocInfo
    readings: list[int] = []
    # In between threads of libraries give back what the last step has used.
    while len(readings) < 2:
        gc.collect()
        info = library.mallinfo2()
        readings.append(int(info.uordblks) + int(info.hblkhd))
    return min(readings)
