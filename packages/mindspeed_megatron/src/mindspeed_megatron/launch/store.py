"""The store on which the ranks of a world meet: served by rank 0 or by a launcher, joined by all others.

A socket that the supervisor opened is served by rank 0, so that nobody else can take its port first. All
waits end with the caller's limit, and what went wrong is told in one message.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mindspeed_core.errors import UserError
from mindspeed_megatron.launch.environment import STORE, Assignment, current_assignment

if TYPE_CHECKING:
    from torch.distributed import Store

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Tells torch's rendezvous that somebody serves the store already, so that every rank only connects."""

_CONNECT_SECONDS = 5.0
_HANDSHAKE_SECONDS = (10.0, 60.0)
"""A store answers within the first, even on a busy host; nobody waits longer than the second."""
_PAUSE_SECONDS = 0.1
_NEVER = timedelta(hours=24)
"""c10d prints a line of its own when it gives up; whoever waits for it gives up earlier."""
_opened: dict[tuple[int, str, int], Store] = {}


@dataclass(frozen=True)
class Limit:
    """Time that ranks wait for each other, and the flag that sets it."""

    time: timedelta
    flag: str

    @property
    def seconds(self) -> float:
        """Return the time in seconds."""
        return self.time.total_seconds()

    def __str__(self) -> str:
        """Return the time and the flag, for messages."""
        minutes, seconds = divmod(self.seconds, 60)
        whole = f"{minutes:.0f} min" if minutes and not seconds else f"{self.seconds:g} s"
        return f"{whole} ({self.flag})"


def serve_rendezvous() -> None:
    """Make ``torch.distributed.init_process_group()`` work in this worker as it does under torchrun."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    if STORE in os.environ:
        open_store(current_assignment(), Limit(timedelta(minutes=30), "timeout"))
    # From here on rank 0 connects like every other rank; torch puts a prefix before the keys of all of them.
    os.environ.pop(STORE, None)
    os.environ[AGENT_STORE] = "True"


def is_agent_store() -> bool:
    """Return whether the launcher serves the store, and keeps it while it starts workers again."""
    return os.environ.get(AGENT_STORE) == "True"


def open_store(own: Assignment, limit: Limit) -> Store:
    """Serve the store on rank 0, connect to it on the others; once per process, address and port.

    Args:
        own: this process's place in the world.
        limit: holds for reaching the store, and for every wait on it.

    Raises:
        UserError: the port is taken, the address does not resolve, or nobody serves the store there.
    """
    key = (os.getpid(), own.address, own.port)
    if key not in _opened:
        _opened[key] = _open(own, limit)
    _opened[key].set_timeout(limit.time)
    return _opened[key]


def _open(own: Assignment, limit: Limit) -> Store:
    import torch.distributed as dist

    options: dict[str, Any] = {"is_master": False}
    inherited = os.environ.get(STORE)
    if inherited is not None:
        options = {"is_master": True, "master_listen_fd": int(inherited)}
    elif own.rank == 0 and not is_agent_store():
        # torch's own rendezvous in this process finds a server for several tenants, and joins it.
        options = {"is_master": True, "master_listen_fd": _listen(own), "multi_tenant": True}
    _wait_for_listener(own, limit)
    opened: list[Store] = []

    def connect() -> None:
        with suppress(RuntimeError):
            opened.append(
                dist.TCPStore(own.address, own.port, timeout=_NEVER, wait_for_workers=False, **options)
            )

    # The constructor waits without end for a listener that never answers.
    thread = threading.Thread(target=connect, name="mindspeed store", daemon=True)
    thread.start()
    shortest, longest = _HANDSHAKE_SECONDS
    thread.join(max(shortest, min(limit.seconds, longest)))
    if not opened:
        # It may have ended since it was found.
        _wait_for_listener(own, Limit(timedelta(0), limit.flag), told=limit)
        raise UserError(
            f"rank {own.rank} of {own.world_size} (host {socket.gethostname()}): what listens at "
            f"{own.meeting_place} is not the store of this job; another program has the port: set another "
            "MASTER_PORT for all ranks"
        )
    return opened[0]


def _listen(own: Assignment) -> int:
    """Return the descriptor of a socket that listens at the port on every address of this host."""
    both = socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ("", own.port),
            family=socket.AF_INET6 if both else socket.AF_INET,
            backlog=max(2048, own.world_size),
            dualstack_ipv6=both,
        )
    except OSError as error:
        raise UserError(
            f"rank 0 of {own.world_size} (host {socket.gethostname()}) cannot serve MASTER_PORT {own.port}: "
            f"{os.strerror(error.errno or 0)}; if another process was started with RANK 0 here, give each a "
            "RANK of its own, otherwise set another MASTER_PORT for all ranks"
        ) from error
    return listener.detach()


def _wait_for_listener(own: Assignment, limit: Limit, *, told: Limit | None = None) -> None:
    """Connect once; ``told`` is the limit for messages where it is another one.

    Raises:
        UserError: nobody listens within the limit.
    """
    deadline = time.monotonic() + limit.seconds
    pause = _PAUSE_SECONDS
    while True:
        try:
            left = max(0.1, deadline - time.monotonic())
            socket.create_connection((own.address, own.port), timeout=min(left, _CONNECT_SECONDS)).close()
        except (OSError, UnicodeError) as error:
            # A name may resolve, and rank 0 may listen, a little later.
            left = deadline - time.monotonic()
            if left > 0:
                time.sleep(min(pause, left))
                pause = min(pause * 1.5, 1.0)
                continue
            raise UserError(_nobody_there(own, told or limit, error)) from error
        else:
            return


def _nobody_there(own: Assignment, limit: Limit, error: OSError | UnicodeError) -> str:
    who = f"rank {own.rank} of {own.world_size} (host {socket.gethostname()})"
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return (
            f"{who}: MASTER_ADDR {own.address!r} did not resolve within {limit}; set it to the name or "
            "number of rank 0's host, the same for every process"
        )
    said = "does not answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    if own.rank == 0 and not is_agent_store():
        return (
            f"{who} serves MASTER_PORT {own.port}, but cannot reach itself at MASTER_ADDR {own.address} "
            f"within {limit}: {said}; set MASTER_ADDR to the name or number of this host, the same for every "
            "process"
        )
    return (
        f"{who} found nobody at {own.meeting_place} within {limit}: {said}; rank 0 did not come there, or "
        "was started with another address or port: look at the first error in its output, and set the same "
        "MASTER_ADDR and MASTER_PORT for every process"
    )
