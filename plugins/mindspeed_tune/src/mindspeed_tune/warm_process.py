"""One warm process for many commands: it has everything imported, and forks a process for every rank.

Jobs of any number of commands are given to it from any thread; each answers through a future.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_core.errors import UserError

_NPU = "fake-npu"


class PlanError(UserError):
    """A rank could not be planned: the command itself is wrong, or its code does not run without values."""


class WarmProcess:
    """The process: it starts with `begin` or the first job, and ends with the context, its ranks with it."""

    def __init__(
        self, platform: str = "fake", parallel: int | None = None, limit: float | None = None
    ) -> None:
        """Describe the process without starting it.

        Args:
            platform: the dry run, whose device's libraries have to be there when it starts.
            parallel: ranks at once, by default one per processor.
            limit: seconds after which a rank counts as one that hangs, and is ended; None for no limit.
        """
        self.platform = platform
        self.limit = limit
        self.parallel = parallel or os.cpu_count() or 1
        self._process: subprocess.Popen[str] | None = None
        self._files = ExitStack()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None
        self._open = self._ended = False

    def __enter__(self) -> WarmProcess:
        """Take jobs from now on."""
        self._open, self._ended = True, False
        return self

    def _start(self) -> subprocess.Popen[str]:
        environment = {
            **(self._stand_ins() if self.platform == _NPU else os.environ),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "mindspeed_tune.nursery", str(self.parallel)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._reader = threading.Thread(
            target=self._read, args=(process,), name="mindspeed outcomes of ranks", daemon=True
        )
        self._reader.start()
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process."""
        with self._lock:
            self._open = False
            process, self._process = self._process, None
        if process is None:
            self._files.close()
            return
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            # It ends its ranks, then itself.
            process.stdin.close()
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert self._reader is not None
        self._reader.join()
        assert process.stdout is not None
        process.stdout.close()
        self._files.close()

    def begin(self) -> None:
        """Start the process before its first job: it imports meanwhile.

        Raises:
            UserError: the kernels of NPUs are wanted, and torch_npu or its stand-in runtime is missing.
        """
        with self._lock:
            self._process = self._process or self._start()

    def submit(self, job: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Give a job to the process; the future has its outcome.

        Args:
            job: as `mindspeed_tune.rank_process.run_rank` takes it.

        Raises:
            UserError: the kernels of NPUs are wanted, and torch_npu or its stand-in runtime is missing.
        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if not self._open:
                raise RuntimeError("enter the context first")
            process = self._process = self._process or self._start()
            assert process.stdin is not None
            number = next(self._numbers)
            if self._ended:
                future.set_exception(_ended())
                return future
            self._waiting[number] = future
            with suppress(BrokenPipeError):
                # A process that is gone is noticed by the reader, which answers everybody who waits.
                process.stdin.write(json.dumps({**job, "job": number, "limit": self.limit}) + "\n")
                process.stdin.flush()
        return future

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = json.loads(line)
            with self._lock:
                future = self._waiting.pop(outcome["job"])
            future.set_result(outcome)
        with self._lock:
            self._ended = True
            left, self._waiting = list(self._waiting.values()), {}
        for future in left:
            future.set_exception(_ended())

    def _stand_ins(self) -> Mapping[str, str]:
        """Return the environment of a process that imports torch_npu where there is no NPU.

        The libraries are made in a temporary folder, for the installed version.
        """
        from mindspeed_megatron.fake.npu import STAND_IN

        if os.environ.get(STAND_IN) == "1":
            return os.environ
        try:
            from mindspeed_testing.npu.stubs import build_stubs, installed_version
        except ModuleNotFoundError:
            raise UserError(
                "--plan-target npu needs a stand-in runtime: pip install mindspeed-tune[npu], or plan "
                "with --plan-target cpu"
            ) from None
        try:
            installed_version()
            folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="mindspeed-npu-"))
            return build_stubs(Path(folder)).environment(device=True)
        except UserError as error:
            raise UserError(f"--plan-target npu: {error}") from None


def _ended() -> PlanError:
    return PlanError("the process that runs ranks ended unexpectedly; its last words stand above")
