"""Ports for servers that a test starts later than it chooses their port."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a port that no server uses now, outside the range that outgoing connections take theirs from.

    On Linux a port that ``bind`` chose is one of that range: by the time a server binds it, a connection of
    another process may hold it.
    """
    with suppress(OSError, ValueError, IndexError):
        lowest = int(_OUTGOING.read_text().split()[0])
        for _ in range(100):
            port = random.SystemRandom().randrange(10_000, lowest)
            with suppress(OSError), socket.create_server(("", port)):
                return port
    with socket.create_server(("127.0.0.1", 0)) as listener:
        chosen: int = listener.getsockname()[1]
    return chosen
