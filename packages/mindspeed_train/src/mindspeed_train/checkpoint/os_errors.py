"""Errors of the operating system in one phrase, with the way out."""

from __future__ import annotations

import errno


def explain(error: BaseException) -> str:
    """Describe an operating-system error in one phrase, with the way out where there is one.

    Args:
        error: any exception; one without an error number is described by its own message.
    """
    number = getattr(error, "errno", None)
    name = getattr(error, "filename", None)
    where = f" ({name})" if name else ""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on the device{where}; free some, or lower --keep-last-n"
    if number == errno.EFBIG:
        return f"the file system refused a write: larger than a file may be (ulimit -f){where}"
    if number == errno.EROFS:
        return f"the file system is read-only{where}; mount it for writing, or choose another folder"
    if number in (errno.EACCES, errno.EPERM):
        return f"no permission{where}; give it to this user, or choose another folder"
    if number in (errno.EEXIST, errno.ENOTDIR):
        return f"something that is no folder is in its place{where}; move it away, or choose another folder"
    return str(error) or type(error).__name__
