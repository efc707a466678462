"""Let the threads of gloo let go of tensors before whoever waited for a collective goes on.

A thread of gloo still holds the tensors of a collective for a moment after it has said that it is over. Which
bytes are alive then depends on the machine's scheduler; a measurement waits that moment out.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mindspeed_core.feature import Patch
from mindspeed_core.runtime.patches import PatchLedger

_THREADS = "/proc/self/task"
_NAME = b"pt_gloo_runloop"
_SLEEPING = b"S"
_IN_A_ROW = 2
_MOST_SECONDS = 1.0


@contextmanager
def released_when_waited() -> Iterator[None]:
    """Return from every ``Work.wait`` only when no thread of gloo of this process runs, or after a second.

    Synchronous collectives wait too. A system that does not show its threads as Linux does is left as it is.
    """
    ledger = PatchLedger()
    ledger.apply(
        [
            Patch(
                target="torch.distributed.distributed_c10d:Work.wait",
                new=_waiting,
                reason="a measurement counts no tensors that a thread is about to let go of",
                kind="wrap",
                owner="gloo threads",
            )
        ]
    )
    try:
        yield
    finally:
        ledger.revert()


def _waiting(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        asleep, last = 0, time.monotonic() + _MOST_SECONDS
        while asleep < _IN_A_ROW and time.monotonic() < last:
            asleep = asleep + 1 if _all_asleep() else 0
            time.sleep(0)
        return result

    return wait


def _all_asleep() -> bool:
    try:
        threads = os.listdir(_THREADS)
    except FileNotFoundError:
        return True
    return all(_state(thread) == _SLEEPING for thread in threads)


def _state(thread: str) -> bytes:
    """Return the scheduler's letter of a thread of gloo; that of a sleeping one for any other."""
    try:
        file = os.open(f"{_THREADS}/{thread}/stat", os.O_RDONLY)
    except OSError:  # It has ended.
        return _SLEEPING
    try:
        stat = os.read(file, 256)
    except OSError:
        return _SLEEPING
    finally:
        os.close(file)
    name, _, rest = stat.partition(b"(")[2].rpartition(b") ")
    return rest[:1] if name.startswith(_NAME) else _SLEEPING
