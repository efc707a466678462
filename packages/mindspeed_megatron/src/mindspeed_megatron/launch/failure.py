"""One message for one failure, however many ranks see it.

When a rank fails, its peers fail too: with the same argument error, or because the connection to the failed
rank closed. Each rank tries to claim a key in the store that all ranks share; the first one prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from mindspeed_core.errors import LostPeerError
from mindspeed_core.terminal.errors import EXPLAINED, exit_status, print_error
from mindspeed_megatron.launch import worker
from mindspeed_megatron.launch.meeting import MeetingError

if TYPE_CHECKING:
    from torch.distributed import Store

_CLAIM = f"mindspeed/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
"""Key of the claim; the agent's store outlives the workers that it restarts."""
_STORE_SECONDS = 15.0
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "recvVector",
    "Socket closed",
)


def is_consequence(error: BaseException) -> bool:
    """Return whether an error only says that another rank went away."""
    text = str(error)
    if isinstance(error, LostPeerError):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(mark in text for mark in _CONSEQUENCES)


def report(error: BaseException) -> int:
    """Print an error unless another rank already did, and return the exit status.

    The message carries the rank it came from. A consequence of another rank's failure is printed only when no
    rank printed its own.
    """
    kind = "explained" if isinstance(error, EXPLAINED) else "unexpected"
    kind, status = "consequence" if is_consequence(error) else kind, exit_status(error)
    if worker.send_message(kind, _text(error), status=status):
        # The supervisor gets every rank's message, and prints that of the one that failed first.
        return status
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        if (
            isinstance(error, MeetingError)
            and error.told_by_rank_zero
            and os.environ.get("LOCAL_RANK") != "0"
        ):
            # Rank 0 prints the same message, and so does the first rank of every other node.
            return status
        store = _shared_store()
        if store is not None and not _claim(store, is_consequence(error)):
            return status
        with contextlib.suppress(OSError, ValueError):
            print(f"rank {rank} of {world}:", file=sys.stderr)
    print_error(error)
    return status


def _text(error: BaseException) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as written:
        print_error(error)
    return written.getvalue()


def _claim(store: Store, consequence: bool) -> bool:
    """Return whether this rank prints; also where the store, which a stopped rank 0 may serve, is silent."""
    answers: list[bool] = []
    asking = threading.Thread(
        target=lambda: answers.append(_ask_store(store, consequence)), name="mindspeed claim", daemon=True
    )
    asking.start()
    asking.join(_STORE_SECONDS)
    return answers[0] if answers else True


def _ask_store(store: Store, consequence: bool) -> bool:
    try:
        if consequence:
            # The rank that failed first may still report; print this error only if none does.
            try:
                store.wait([_CLAIM], timedelta(seconds=5))
            except RuntimeError:
                return store.add(_CLAIM, 1) == 1
            return False
        return store.add(_CLAIM, 1) == 1
    except (RuntimeError, OSError):
        return True


def _shared_store() -> Store | None:
    """Return the store of the running process group, or of the agent that started this process."""
    try:
        import torch.distributed as dist
    except ImportError:
        return None
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address and port and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            return dist.TCPStore(address, int(port), is_master=False, timeout=timedelta(seconds=5))
        except (RuntimeError, OSError):
            return None
    return None
