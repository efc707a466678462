"""Read the small files that flags name: tokenizers, and lists of datasets.

A path on a command line may be a folder, a pipe nobody writes to, or a device that never ends; opening or
reading one of these would wait for ever or fill the memory.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mindspeed_core.errors import NamedFileError

LARGEST = 2**30
"""Bytes of the largest file that is read as a whole; tokenizers of large vocabularies have some 2**25."""


def read_named_file(flag: str, path: str | Path, remedy: str) -> bytes:
    """Return the content of a file that a flag names.

    Args:
        flag: the option string.
        path: its value.
        remedy: the way out when there is no such file, or it cannot be read.

    Raises:
        NamedFileError: it is missing, unreadable, no regular file, or larger than 1 GiB.
    """
    try:
        # A pipe without a writer would block an ordinary open.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        # ValueError: a path with a null byte, which only programs can pass.
        raise _unreadable(flag, path, error, remedy) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NamedFileError(flag, str(path), f"is {_kind(status.st_mode)}, not a file", remedy)
        if status.st_size > LARGEST:
            reason = f"has {status.st_size} bytes, more than {LARGEST} are not read"
            raise NamedFileError(flag, str(path), reason, remedy)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            # A read takes as much memory as it asks for, however small the file is.
            return stream.read(status.st_size)
    except OSError as error:
        raise _unreadable(flag, path, error, remedy) from error
    finally:
        os.close(descriptor)


def _unreadable(flag: str, path: str | Path, error: Exception, remedy: str) -> NamedFileError:
    reason = getattr(error, "strerror", None) or str(error)
    return NamedFileError(flag, str(path), f"cannot be read ({reason})", remedy)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")
