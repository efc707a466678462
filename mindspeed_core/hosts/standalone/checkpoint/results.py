"""Results that the forked writers of a checkpoint leave for the training process.

megatron-core uses the queue of a ``multiprocessing`` manager, a spawned interpreter that imports the main
program again: slow on the first save, fatal for scripts without a ``__main__`` guard, and orphaned when the
trainer is killed. One small file per result needs no process; a pipe would block on large results.
"""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_core.session import Session


class FileResults:
    """A queue of picklable objects between a process and its forked children; one file each.

    Each save has a directory of its own, which goes with the last result taken. It is private to this user,
    so that unpickling reads only what our own children wrote.
    """

    def __init__(self) -> None:
        self._number = 0
        self._open()

    def renew(self) -> None:
        """Start the next save, dropping results that nobody took (of a save that failed)."""
        self._finalizer()
        self._open()

    def _open(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mindspeed-results-"))
        self._finalizer = weakref.finalize(self, _remove_in, os.getpid(), self._directory)

    def put(self, item: Any) -> None:
        """Add a result; it becomes visible complete or not at all."""
        self._number += 1
        name = f"{os.getpid()}-{self._number:06d}"
        unfinished = self._directory / f"{name}.t"
        unfinished.write_bytes(pickle.dumps(item))
        os.rename(unfinished, self._directory / name)

    def get_nowait(self) -> Any:
        """Take a result.

        Raises:
            queue.Empty: there is none.
        """
        names = self._names()
        if not names:
            raise queue.Empty
        path = self._directory / names[0]
        item = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own child, see the class
        path.unlink()
        if len(names) == 1:
            self._finalizer()
        return item

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Take a result like `get_nowait`: a result is there when its writer has ended."""
        return self.get_nowait()

    def empty(self) -> bool:
        """Return whether there is no result."""
        return not self._names()

    def _names(self) -> list[str]:
        if not self._directory.is_dir():
            return []
        return sorted(name for name in os.listdir(self._directory) if not name.endswith(".t"))


def _remove_in(pid: int, directory: Path) -> None:
    # A forked writer has a copy of the object and must leave the directory to its parent.
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)


def use_file_results(session: Session) -> FileResults:
    """Make megatron-core's writers use files for their results until the session closes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    current = filesystem_async._results_queue
    if isinstance(current, FileResults):
        current.renew()
        return current
    results = FileResults()
    session.ledger.set_attribute(
        filesystem_async,
        "_results_queue",
        results,
        owner="standalone",
        reason="megatron-core's own queue spawns an interpreter that imports the main program again",
    )
    return results
