"""Failures in one phrase, for the message that all ranks raise; without torch, as in the writing process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_core.errors import CheckpointError
from mindspeed_train.checkpoint.os_errors import explain


class WorkerLost(Exception):
    """The process ended, or was ended, before its work was done; the message names it and how."""


def reason_of(error: BaseException) -> str:
    """Return a failure in one phrase."""
    if isinstance(error, WorkerLost):
        return str(error)
    if isinstance(error, CheckpointError):
        return "\0" + str(error)
    system = find_os_error(error)
    if system is not None:
        return explain(system)
    cause = unwrap_failure(error)
    return f"{type(cause).__name__}: {cause}"


def unwrap_failure(error: BaseException) -> BaseException:
    """Return the first rank's own exception where torch wrapped it into one that prints all tracebacks."""
    failures = _failures(error)
    return next(iter(failures.values()))[0] if failures else error


def find_os_error(error: BaseException | None) -> OSError | None:
    """Return the operating-system error behind an exception, also where torch wrapped it into its own."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, OSError) and current.errno is not None:
            return current
        pending += [current.__cause__, current.__context__]
        # torch.distributed.checkpoint keeps each rank's exception with its traceback summary.
        pending += [wrapped[0] for wrapped in _failures(current).values()]
    return None


def _failures(error: BaseException) -> Mapping[int, Any]:
    """Return the exceptions of all ranks in torch's ``CheckpointException``, by rank."""
    return error.failures if type(error).__name__ == "CheckpointException" else {}  # type: ignore[attr-defined]
