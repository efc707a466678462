"""The folder that a run saves into, and its only owner, on whatever machine.

Two runs that save into one folder would publish a mixture of both and delete each other's checkpoints. The
owner leaves a file with its name and touches it as long as it lives; another run is refused at its start. An
owner that died is recognised by its process on this machine, and elsewhere by a file that nobody touches:
clocks of machines are not compared.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_core.errors import CheckpointError
from mindspeed_megatron.launch.environment import current_job
from mindspeed_train.checkpoint.os_errors import explain
from mindspeed_train.checkpoint.processes import host_name, process_namespace, start_of

if TYPE_CHECKING:
    from mindspeed_core.session import Session

logger = logging.getLogger("mindspeed_core")

FILE = ".owner.json"
TOUCH_SECONDS = 10.0
"""Time between two touches of the file."""
SILENT_SECONDS = 35.0
"""Time without a touch after which an owner on another machine counts as dead."""
ENDING_SECONDS = 5.0
"""Time that an owner on this machine gets to end, as one that was just killed does."""
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Owner:
    """A run that saves into a folder.

    Attributes:
        host: name of the machine of its rank 0.
        namespace: of the process ids there, see `process_namespace`.
        pid: process id of its rank 0.
        start: when that process began, see `start_of`.
        job: the job that it is an attempt of; empty where nobody restarts it.
        restart: how often that job was started again.
        since: local time at which it began to own the folder.
    """

    host: str
    namespace: int = 0
    pid: int = 0
    start: int = 0
    job: str = ""
    restart: int = 0
    since: str = "unknown"

    def __str__(self) -> str:
        job = f" of job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_same_run(self, other: Owner) -> bool:
        """Return whether both are the same process."""
        return replace(self, since=other.since) == other


def this_process() -> Owner:
    """Return this process as the owner of a folder."""
    job = current_job()
    return Owner(
        host_name(),
        process_namespace(),
        os.getpid(),
        start_of(os.getpid()),
        job.name,
        job.restart,
        time.strftime("%Y-%m-%d %H:%M:%S"),
    )


class SaveFolder:
    """The folder that a session saves into; for rank 0 alone, which publishes."""

    def __init__(self) -> None:
        """Own nothing yet."""
        self._folder: Path | None = None
        self._mine = Owner("")
        self._released = threading.Event()

    def keep(self, folder: Path, at_close: Callable[[Callable[[], object]], object]) -> None:
        """Become the owner of a folder, or make sure of still being it.

        Args:
            folder: is made where it is missing.
            at_close: takes the action that gives the folder up; called once.

        Raises:
            CheckpointError: another run saves into it, or it cannot be written to.
        """
        if folder != self._folder:
            self.release()
            self._mine = this_process()
            self._claim(folder)
            self._folder, self._released = folder, threading.Event()
            threading.Thread(
                target=_touch, args=(folder, self._mine, self._released), name="mindspeed owner", daemon=True
            ).start()
            at_close(self.release)
        self.check()

    def check(self) -> None:
        """Make sure that no other run took the folder over, for instance while this process was stopped.

        Raises:
            CheckpointError: one did.
        """
        if self._folder is None:
            return
        found = read_owner(self._folder)
        if found is None:
            # Somebody removed the folder, or the file in it.
            self._claim(self._folder)
        elif not found.is_same_run(self._mine):
            raise CheckpointError(_refusal(self._folder, found))

    def release(self) -> None:
        """Give the folder up; another run may have it at once."""
        folder, self._folder = self._folder, None
        self._released.set()
        if folder is None:
            return
        found = _read_or_none(folder)
        if found is not None and found.is_same_run(self._mine):
            with suppress(OSError):
                (folder / FILE).unlink()

    def _claim(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while not _create(folder, self._mine):
                found = read_owner(folder)
                if found is None:
                    continue
                if found.is_same_run(self._mine):
                    return
                if _lives(folder, found, self._mine):
                    raise CheckpointError(_refusal(folder, found))
                logger.warning("--save %s: taking over from a run that ended (%s)", folder, found)
                _replace(folder, self._mine)
        except OSError as error:
            raise CheckpointError(f"--save {folder}: {explain(error)}") from error


def own(session: Session, folder: Path) -> None:
    """Make a session the owner of a folder, or make sure that it still is; for rank 0.

    Raises:
        CheckpointError: see `SaveFolder.keep`.
    """
    session.state(SaveFolder).keep(folder, session.at_close)


def read_owner(folder: Path) -> Owner | None:
    """Return who saves into a folder; one without a name where the file cannot be understood.

    Raises:
        OSError: it cannot be read.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return Owner(**{name: type(default)(found[name]) for name, default in asdict(Owner("")).items()})
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError):
        return Owner("an unknown machine")


def _refusal(folder: Path, owner: Owner) -> str:
    return (
        f"--save {folder}: another run saves into it ({owner}); end that one, or choose another folder (if "
        f"it is no training any more, delete {folder / FILE})"
    )


def _create(folder: Path, owner: Owner) -> bool:
    try:
        with (folder / FILE).open("x", encoding="utf-8") as file:
            json.dump(asdict(owner), file)
    except FileExistsError:
        return False
    return True


def _replace(folder: Path, owner: Owner) -> None:
    beside = folder / f"{FILE}.{owner.host}-{owner.pid}"
    beside.write_text(json.dumps(asdict(owner)), encoding="utf-8")
    os.replace(beside, folder / FILE)


def _lives(folder: Path, owner: Owner, mine: Owner) -> bool:
    """Return whether an owner still lives, after some time to look."""
    if (owner.host, owner.namespace) == (mine.host, mine.namespace):
        return not _comes_true(lambda: start_of(owner.pid) != owner.start, ENDING_SECONDS)
    if owner.job and owner.job == mine.job and owner.restart < mine.restart:
        # Launchers start a job again when its processes have ended.
        return False
    touched = _touched(folder)
    return _comes_true(lambda: _touched(folder) != touched, SILENT_SECONDS) and _touched(folder) is not None


def _touched(folder: Path) -> tuple[int, str] | None:
    try:
        # Network file systems ask the server again when a file is opened, and not before.
        with (folder / FILE).open(encoding="utf-8", errors="replace") as file:
            return os.fstat(file.fileno()).st_mtime_ns, file.read()
    except FileNotFoundError:
        return None


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def _touch(folder: Path, mine: Owner, released: threading.Event) -> None:
    while not released.wait(TOUCH_SECONDS):
        found = _read_or_none(folder)
        if found is not None and found.is_same_run(mine):
            with suppress(OSError):
                os.utime(folder / FILE)


def _read_or_none(folder: Path) -> Owner | None:
    with suppress(OSError):
        return read_owner(folder)
    return None
