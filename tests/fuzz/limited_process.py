"""Cases in a process that may do little: limited time and memory, no events but of reading a folder.

One forked process runs many cases. It ends where a case goes too far, the parent notes which, and the next
process goes on behind it.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

SECONDS = 5
MEMORY = 1 << 30
_DEAD = {
    -signal.SIGALRM: "took longer than 5 s",
    -signal.SIGSEGV: "ended in SIGSEGV",
    -signal.SIGABRT: "ended in SIGABRT",
    -signal.SIGBUS: "ended in SIGBUS",
}
_FORBIDDEN = (
    "exec",
    "import",
    "os.",
    "subprocess.",
    "socket.",
    "ctypes.",
    "pickle.",
    "marshal.",
    "shutil.",
    "code.",
    "sys.addaudithook",
    "sys.settrace",
    "sys.setprofile",
    "object.__setattr__",
    "builtins.input",
    "winreg.",
    "urllib.",
    "webbrowser.",
)
_HARMLESS = ("os.listdir", "os.scandir", "os.putenv")


def run_cases(
    count: int, case: Callable[[int, Path], str], folder: Path, warm: Callable[[], None]
) -> list[str]:
    """Run cases 0 to ``count - 1``; return what went wrong, one line each.

    Args:
        count: how many.
        case: runs one, which may only read ``folder``; returns a complaint or an empty text.
        folder: receives the files of a case; the case writes them before it calls `begin_reading`.
        warm: does once, without limits, whatever imports modules.
    """
    complaints: list[str] = []
    at = 0
    while at < count:
        at = _run_from(at, count, case, folder, warm, complaints)
    return complaints


def _run_from(
    first: int,
    count: int,
    case: Callable[[int, Path], str],
    folder: Path,
    warm: Callable[[], None],
    complaints: list[str],
) -> int:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        status = 70
        try:
            _child(first, count, case, folder, warm, writer)
            status = 0
        except BaseException as error:
            os.write(2, f"the process of the cases failed: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    os.close(writer)
    received = b""
    while chunk := os.read(reader, 1 << 16):
        received += chunk
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    last = first - 1
    while received:
        number, length = struct.unpack_from("<iI", received)
        text = received[8 : 8 + length].decode(errors="replace")
        received = received[8 + length :]
        last = number
        if text:
            complaints.append(f"case {number}: {text}")
    if status == 0:
        return count
    if status == 70:
        raise RuntimeError(f"the process of the cases failed at case {last + 1}")
    complaints.append(f"case {last + 1}: {_DEAD.get(status, f'ended with {status}')}")
    return last + 2


class _Watch:
    """The audit hook of the process; ``reading`` is set while a case reads."""

    reading = False
    folder = ""
    broken = ""

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self.reading:
            return
        if event == "open":
            path, mode, flags = arguments
            name = "" if isinstance(path, int) else os.fsdecode(path)  # type: ignore[arg-type]
            # Tracebacks that torch keeps show lines of source.
            inside = isinstance(path, int) or name.startswith(self.folder) or name.endswith(".py")
            writes = (mode and set("wax+") & set(str(mode))) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if inside and not writes:
                return
        elif event in _HARMLESS or not event.startswith(_FORBIDDEN) or _is_known(event, arguments):
            return
        self.broken = f"{event} {arguments[:2]!r}"[:300]
        raise PermissionError(f"a case did {self.broken}")


def _is_known(event: str, arguments: tuple[object, ...]) -> bool:
    return event == "import" and arguments[0] in sys.modules


_watch = _Watch()


def begin_reading() -> None:
    """Let a case do nothing from here on but read its folder."""
    _watch.reading = True


def _child(
    first: int,
    count: int,
    case: Callable[[int, Path], str],
    folder: Path,
    warm: Callable[[], None],
    writer: int,
) -> None:
    warnings.simplefilter("ignore")
    # The traceback of a panic takes more memory than a case may have.
    os.environ["RUST_BACKTRACE"] = "0"
    # Records that somebody captures keep exceptions, and all that these refer to.
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    warm()
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _watch.folder = str(folder.resolve())
    sys.addaudithook(_watch)
    for number in range(first, count):
        _watch.broken = ""
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            text = case(number, folder)
        finally:
            _watch.reading = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        # Whoever catches the error of the hook has still done it.
        text = f"did {_watch.broken}" if _watch.broken else text
        content = text.encode(errors="replace")[:2000]
        os.write(writer, struct.pack("<iI", number, len(content)) + content)
