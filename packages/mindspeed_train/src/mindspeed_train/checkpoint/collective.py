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
from mindspeed_core.runtime.gather import all_gather_values
from mindspeed_train.checkpoint.reasons import reason_of

T = TypeVar("T")

FAILURES = (Exception, CheckpointException)
"""Exceptions that a save or load may raise; torch's own exception is no ``Exception``."""


def on_all_ranks(doing: str, action: Callable[[], T]) -> T:
    """Run an action on every rank; raise on every rank when it failed on any.

    Args:
        doing: begins the message, for instance ``saving /data/ckpt``.
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
        _fail(doing, failed, error)
    return result


def on_first_rank(doing: str, action: Callable[[], T]) -> T:
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
        _fail(doing, [(0, answer[1])], error)
    return answer[0]


def _fail(doing: str, failed: list[tuple[int, str]], error: BaseException | None) -> NoReturn:
    # The root cause is the most specific message: ranks that only noticed another's failure say less.
    rank, reason = min(failed, key=lambda item: (item[1].startswith("CheckpointException"), item[0]))
    where = f" (rank {rank})" if dist.get_world_size() > 1 else ""
    # The action's own message names the file already.
    text = reason.removeprefix("\0") if reason.startswith("\0") else f"{doing}{where}: {reason}"
    raise CheckpointError(text) from error
