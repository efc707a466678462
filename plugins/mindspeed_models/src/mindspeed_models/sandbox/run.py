"""Run one program in the sandbox and say how it ended."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from mindspeed_core.errors import UserError
from mindspeed_core.terminal.foreign_text import shown
from mindspeed_models.sandbox import launcher

FLAG = "--allow-code-execution"
Form = Literal["namespaces", "plain"]
_TAIL = 2000
_BUILD_SECONDS = 60.0


@dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
        seconds: from its begin on the clock, and of CPU.
        memory: bytes of address space.
        file_bytes: longest file; standard output and error count, too.
        disk_bytes: of its own file system, with namespaces.
    """

    seconds: float = 5.0
    memory: int = 1 << 30
    file_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class Outcome:
    """The end of one program.

    Attributes:
        passed: it ran to its end.
        reason: ``passed``, ``timed out``, ``ended early`` (status 0 before the end), ``failed``, or the
            signal that ended it.
        error: the end of its standard error.
        seconds: on the clock, start and end of the sandbox included.
    """

    passed: bool
    reason: str
    error: str
    seconds: float


class SandboxFailed(Exception):
    """The sandbox itself could not be built; the program was not run."""


class Sandbox:
    """Runs programs, each in a fresh interpreter, in the strongest form that the system has."""

    def __init__(self, limits: Limits | None = None, *, form: Form | None = None) -> None:
        """Find out what the system has.

        Args:
            limits: of each program.
            form: instead of the strongest one.

        Raises:
            UserError: there is no form that is safe here.
        """
        self.limits = limits or Limits()
        if not sys.platform.startswith("linux"):
            raise UserError(f"{FLAG}: the sandbox needs Linux; run the evaluation in a Linux container")
        forms: tuple[Form, ...] = ("namespaces", "plain") if form is None else (form,)
        reasons = []
        for each in forms:
            if each == "plain" and os.geteuid() == 0:
                reasons.append("as root nothing else holds a program back")
                continue
            self.form: Form = each
            try:
                outcome = self.run("pass\n")
            except SandboxFailed as error:
                reasons.append(f"{each}: {error}")
                continue
            if outcome.passed:
                return
            reasons.append(f"{each}: {outcome.reason} {shown(outcome.error, 200)}")
        raise UserError(
            f"{FLAG}: there is no sandbox here ({'; '.join(reasons)}); allow user namespaces, or run as "
            "another user than root"
        )

    def run(self, program: str) -> Outcome:
        """Run a program.

        Raises:
            SandboxFailed: the sandbox could not be built.
        """
        # A program that leaves with status 0 before its end has not passed.
        token = secrets.token_hex(16)
        end = f"import sys as _s; _s.stdout.write('\\n{token}'); _s.stdout.flush()"
        whole = f"{program}\n{end}\n"
        folder = tempfile.mkdtemp(prefix="sandbox-")
        began = time.monotonic()
        try:
            with (
                tempfile.TemporaryFile() as given,
                tempfile.TemporaryFile() as out,
                tempfile.TemporaryFile() as err,
            ):
                given.write(whole.encode("utf-8", "replace"))
                given.seek(0)
                begun, status = self._run(folder, given, out, err)
                error = _tail(err)
                ended = _tail(out).endswith(token)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = time.monotonic() - began
        if not begun:
            raise SandboxFailed(shown(error, 200) or f"it was not built in {_BUILD_SECONDS:g} s")
        passed = status == 0 and ended
        return Outcome(passed, "passed" if passed else _reason(status), error, seconds)

    def _run(self, folder: str, given: IO[bytes], out: IO[bytes], err: IO[bytes]) -> tuple[bool, int | None]:
        """Return whether the program began, and its status; None where time was up."""
        limits = self.limits
        reader, writer = os.pipe()
        command = [
            *(os.path.realpath(sys.executable), "-I", "-S", str(Path(launcher.__file__)), folder),
            *(str(limits.memory), str(limits.file_bytes), str(int(limits.seconds) + 1)),
            *(str(limits.disk_bytes), self.form, str(writer)),
        ]
        try:
            with os.fdopen(writer, "wb"):
                process = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    env={},
                    cwd="/",
                    start_new_session=True,
                    pass_fds=(writer,),
                )
            try:
                # The time of a program begins with it: a busy machine builds a sandbox slowly.
                readable, _, _ = select.select([reader], [], [], _BUILD_SECONDS)
                begun = bool(readable) and os.read(reader, 1) != b""
                status: int | None = process.wait(limits.seconds)
            except BaseException as error:
                # Its session ends with it, and with namespaces every process inside.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                status = None
            return begun, status
        finally:
            os.close(reader)


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return file.read().decode("utf-8", "replace")


def _reason(status: int | None) -> str:
    if status is None:
        return "timed out"
    if status == 0:
        return "ended early"
    number = -status if status < 0 else status - 128 if status > 128 else 0
    if number:
        with suppress(ValueError):
            return f"ended by {signal.Signals(number).name}"
    return "failed"
