"""A training job whose processes are killed at random moments, and the proof that nothing but time was lost.

The job runs as a user starts it, with ``mindspeed-train --nproc N --max-restarts K``, and is started again
by the same command where nothing of it is left. What it printed and published is compared with an undisturbed
job.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from mindspeed_megatron.tracker import TRACKER
from mindspeed_testing.faults import Job, KillReport, read_steps, start_job

VICTIMS = ("rank", "supervisor", "writer", "all")
"""One worker; the process that supervises the workers; a process that writes a checkpoint for a worker; the
supervisor with everything it started, as when a machine fails."""

_WRITER_SECONDS = 20.0
_END_SECONDS = 30.0


def kill_repeatedly(
    flags: Sequence[str],
    folder: Path,
    *,
    processes: int,
    kills: int,
    seed: int,
    victims: Sequence[str] = ("rank",),
    longest_delay: float = 1.2,
    patience: float = 60.0,
) -> KillReport:
    """Run a job, kill random parts of it at random moments, then end it with SIGTERM.

    Args:
        flags: of the program, without ``--save``, ``--load``, ``--run-dir``, ``--nproc`` and
            ``--max-restarts``; steps must be plenty. With ``writer`` among the victims also
            ``--on-save-failure continue``, or the job ends with the first one.
        folder: takes the job's files.
        processes: workers.
        kills: how many times something is killed with SIGKILL.
        seed: of the moments and the victims.
        victims: the kinds of victim, of `VICTIMS`; each has the same share. Where no writer lives for 20 s, a
            worker is killed in its place.
        longest_delay: seconds between the start of the workers and the latest kill, whatever they do then:
            start, train, save.
        patience: seconds that any single thing may take, a restart or a published checkpoint.

    Raises:
        AssertionError: the job hangs or ends by itself; with what it printed.
    """
    return _Killing(flags, folder, processes, kills, seed, victims, longest_delay, patience).run()


class _Killing:
    """One job that is killed and started again, until it has been killed often enough."""

    def __init__(
        self,
        flags: Sequence[str],
        folder: Path,
        processes: int,
        kills: int,
        seed: int,
        victims: Sequence[str],
        longest_delay: float,
        patience: float,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._choice = random.Random(seed)
        self._save = folder / "checkpoints"
        self._output = folder / "output.txt"
        own = ["--nproc", str(processes), "--max-restarts", str(kills), "--save", str(self._save)]
        if {"supervisor", "all"} & set(victims):
            # The same command has to continue what it began.
            own += ["--load", str(self._save)]
        self._flags = [*flags, *own, "--run-dir", str(folder / "run")]
        self._victims = [victims[number % len(victims)] for number in range(kills)]
        self._choice.shuffle(self._victims)
        self._processes = processes
        self._longest_delay, self._patience = longest_delay, patience
        self._known: set[int] = set()
        self._report = KillReport()
        self._job = self._start()

    def run(self) -> KillReport:
        report = self._report
        published: list[tuple[int, int]] = []
        killed = ""
        try:
            for number, victim in enumerate(self._victims):
                self._wait(self._all_work)
                # Every third attempt lives until it has published something, so that the job gets on.
                # After a writer's end no start follows that would show that it gets on.
                if number % 3 == 0 or killed == "writer":
                    self._wait_for_later()
                self._job.pause(self._choice.uniform(0.0, self._longest_delay))
                published.append((len(self._job.starts()), _latest(self._save)))
                killed = self._kill(victim)
                report.victims[killed] = report.victims.get(killed, 0) + 1
                report.kills += 1
            self._wait(self._all_work)
            self._wait_for_later()
            self._job.process.send_signal(signal.SIGTERM)
            self._job.end_well(self._patience)
        finally:
            self._job.close()
        self._look_back(published)
        return report

    def _look_back(self, published: Sequence[tuple[int, int]]) -> None:
        report = self._report
        report.starts = self._job.starts()
        for attempt, latest in published:
            # An attempt that was killed before it trained printed no start; the next one counts.
            if attempt < len(report.starts) and report.starts[attempt] < latest:
                report.lost.append(
                    f"step {latest} was published, the next attempt began at {report.starts[attempt]}"
                )
        report.orphans = sorted(map(str, _writing_into(self._output)))
        read_steps(self._job.text(), report)
        report.last = _latest(self._save)
        report.leftovers = sorted(path.name for path in self._save.iterdir() if path.name.startswith("."))

    def _start(self) -> Job:
        self._report.commands += 1
        return start_job(self._flags, self._output)

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._job.wait_for(condition, seconds=self._patience)

    def _wait_for_later(self) -> None:
        before = _latest(self._save)
        self._wait(lambda: _latest(self._save) > before)

    def _all_work(self) -> bool:
        return len({worker.pid for worker in self._job.workers()} - self._known) == self._processes

    def _kill(self, victim: str) -> str:
        """Kill a victim, and start the program again where nothing of it is left; return what was killed."""
        workers = self._job.workers()
        if victim == "writer":
            if self._kill_writer():
                return victim
            victim, workers = "rank", self._job.workers()
        self._known |= {worker.pid for worker in workers}
        if victim == "rank":
            self._choice.choice(workers).kill()
            return victim
        family = [psutil.Process(self._job.process.pid), *_descendants(self._job.process.pid)]
        family[0].kill()
        if victim == "all":
            for worker in workers:
                # Each worker leads a group, with what it forked.
                with suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
        self._job.process.wait(self._patience)
        end = time.monotonic() + _END_SECONDS
        while left := [process for process in family if _works(process)]:
            if time.monotonic() > end:
                raise AssertionError(f"processes outlive their supervisor by {_END_SECONDS:g} s: {left}")
            time.sleep(0.02)
        self._job = self._start()
        return victim

    def _kill_writer(self) -> bool:
        """Kill a process that works for a worker, as soon as one writes; False where none does."""
        end = time.monotonic() + _WRITER_SECONDS
        while time.monotonic() < end:
            # The process lives between saves too, where nothing would be lost with it.
            for worker in self._job.workers() if any(self._save.glob(".tmp-*")) else ():
                writers = _descendants(worker.pid)
                if writers:
                    with suppress(psutil.NoSuchProcess):
                        self._choice.choice(writers).kill()
                        return True
            if not self._job.pause(0.0):
                break
        return False


def _writing_into(output: Path) -> list[psutil.Process]:
    """Return the processes that live with an open output of the job."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(Path(file.path) == output.resolve() for file in process.open_files()):
                found.append(process)
    return found


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [child for child in psutil.Process(pid).children(recursive=True) if _works(child)]
    return []


def _works(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _latest(save: Path) -> int:
    with suppress(OSError, ValueError):
        return int((save / TRACKER).read_text())
    return 0
