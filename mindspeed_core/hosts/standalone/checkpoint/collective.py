"""Actions that succeed on all ranks or fail on all, with one message.

An error that only one rank sees leaves the others waiting in the next collective until its timeout; each
phase of a save or load therefore ends with an exchange of errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_core.errors import CheckpointError
from mindspeed_core.hosts.standalone.checkpoint.background import WorkerLost
from mindspeed_core.hosts.standalone.checkpoint.publish import explain
from mindspeed_core.runtime.gather import all_gather_values

T = TypeVar("T")

FAILURES = (Exception, CheckpointException)
"""Exceptions that a save or load may raise; torch's own exception is no ``Exception``."""


def on_all_ranks(what: str, action: Callable[[], T]) -> T:
    """Run an action on every rank; raise on every rank when it failed on any.

    Args:
        what: begins the message, for instance ``saving /data/ckpt``.
        action: what this rank does; collectives inside must not be left early by only some ranks.

    Raises:
        CheckpointError: with the first failing rank's reason.
    """
    error: BaseException | None = None
    result: Any = None
    try:
        result = action()
    except FAILURES as caught:
        error = caught
    reasons = all_gather_values(None if error is None else reason_of(error))
    failed = [(rank, reason) for rank, reason in enumerate(reasons) if reason is not None]
    if failed:
        _fail(what, failed, error)
    return result


def on_first_rank(what: str, action: Callable[[], T]) -> T:
    """Run an action on rank 0 and return its (picklable) result on all ranks; raise on all when it failed.

    Raises:
        CheckpointError: with rank 0's reason, see `on_all_ranks`.
    """
    answer: list[Any] = [None, None]
    error: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            answer[0] = action()
        except FAILURES as caught:
            error = caught
            answer[1] = reason_of(caught)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        _fail(what, [(0, answer[1])], error)
    return answer[0]


def _fail(what: str, failed: list[tuple[int, str]], error: BaseException | None) -> NoReturn:
    # The root cause is the most specific message: ranks that only noticed another's failure say less.
    rank, reason = min(failed, key=lambda item: (item[1].startswith("CheckpointException"), item[0]))
    where = f" (rank {rank})" if dist.get_world_size() > 1 else ""
    # The action's own message names the file already.
    text = reason.removeprefix("\0") if reason.startswith("\0") else f"{what}{where}: {reason}"
    raise CheckpointError(text) from error


def reason_of(error: BaseException) -> str:
    """Return a failure in one phrase, for the message that all ranks raise."""
    if isinstance(error, WorkerLost):
        return str(error)
    if isinstance(error, CheckpointError):
        return "\0" + str(error)
    system = find_os_error(error)
    if system is not None:
        return explain(system)
    cause = unwrap_failure(error)
    if "inline_container.cc" in str(cause):
        # All that torch's archive writer says when a write did not succeed.
        return (
            "the file system refused a write (disk full, quota or file size limit); free some, or lower "
            "--keep-last-n"
        )
    return f"{type(cause).__name__}: {cause}"


def unwrap_failure(error: BaseException) -> BaseException:
    """Return the first rank's own exception where torch wrapped it into one that prints all tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error


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
        if isinstance(current, CheckpointException):
            pending += [wrapped[0] for wrapped in current.failures.values()]
    return None
