"""The HTTP server: threads for connections, in front of one model that answers in batches."""

from __future__ import annotations

import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import ThreadingHTTPServer
from importlib import resources
from typing import Any

from mindspeed_core.errors import ArgumentError
from mindspeed_core.terminal.foreign_text import first_line
from mindspeed_models.serving.asked import Sizes
from mindspeed_models.serving.deadlines import Deadlines
from mindspeed_models.serving.handler import Handler
from mindspeed_models.serving.prompts import Prompts
from mindspeed_models.serving.settings import Limits
from mindspeed_models.serving.waiting import WaitingLine

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: 58\r\n\r\n"
    b'{"error":{"message":"too many clients","type":"overload"}}'
)


class Server(ThreadingHTTPServer):
    """The server of one model.

    Attributes:
        line: answers that wait.
        limits: of what clients may ask for.
        prompts: turn text into ids.
        sizes: of the model, and its names.
        keys: that clients send; empty for none.
        page: the HTML page.
        say: takes a line for each request; None for silence.
        deadlines: of connections.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        prompts: Prompts,
        sizes: Sizes,
        limits: Limits,
        *,
        keys: tuple[bytes, ...] = (),
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Bind the port; nothing is answered before `serving`.

        Raises:
            ArgumentError: the port is in use, or the host is not one of this machine.
        """
        self.line = WaitingLine(limits)
        self.limits = limits
        self.prompts = prompts
        self.sizes = sizes
        self.keys = keys
        self.page = resources.files("mindspeed_models.serving").joinpath("page.html").read_text("utf-8")
        self.say = say
        self.started = int(time.time())
        self._places = threading.BoundedSemaphore(limits.connections)
        self._open: set[socket.socket] = set()
        self._opened = threading.Lock()
        self._thread: threading.Thread | None = None
        host, port = address
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        except (OSError, UnicodeError) as error:
            reason = f"is no address ({first_line(error)})"
            raise ArgumentError("--host", host, reason, "use one of this machine") from error
        try:
            super().__init__(address, Handler)
        except OSError as error:
            flag, value = ("--host", host) if error.errno == 99 else ("--port", str(port))
            raise ArgumentError(
                flag,
                value,
                f"cannot listen there ({error.strerror})",
                "use another, or --port 0 for a free one",
            ) from error
        self.deadlines = Deadlines()

    @property
    def url(self) -> str:
        """Return the address to open."""
        host, port = self.server_address[:2]
        text = str(host)
        return f"http://{f'[{text}]' if ':' in text else text}:{port}"

    def state(self) -> dict[str, Any]:
        """Return what ``/health`` answers."""
        status = "ok" if self.line.closed is None else "closing"
        return {"status": status, "waiting": len(self.line), "running": self.line.running}

    def models(self) -> list[dict[str, Any]]:
        """Return the model and its adapters as OpenAI lists them."""
        return [
            {"id": name, "object": "model", "created": self.started, "owned_by": "mindspeed"}
            for name in self.sizes.names
        ]

    def server_bind(self) -> None:
        """Bind the port, without the search for a name of this machine, which may ask the network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = map(str, self.server_address[:2])  # type: ignore[assignment]

    def start(self) -> None:
        """Begin to answer, in a thread of its own."""
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        )
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Take no more connections, wait a moment for the open ones, then end them, too."""
        self.line.close("the server ends")
        if self._thread is not None:
            self.shutdown()
            self._thread.join()
        self.server_close()
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end:
            # Idle connections wait for a request that will not be answered.
            with self._opened:
                for connection in self._open:
                    with suppress(OSError):
                        connection.shutdown(socket.SHUT_RD)
            time.sleep(0.02)
        with self._opened:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.deadlines.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread, or turn it away where there are too many."""
        if not self._places.acquire(blocking=False):
            with suppress(OSError):
                request.settimeout(0)
                request.send(_FULL)
            self.shutdown_request(request)
            return
        with self._opened:
            self._open.add(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._left(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._left(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a fault; clients that go are none."""
        error = sys.exc_info()[1]
        if self.say is not None and error is not None and not isinstance(error, OSError):
            self.say(
                f"fault while answering {client_address[0]}: {type(error).__name__}: {first_line(error)}"
            )

    def _left(self, request: Any) -> None:
        with self._opened:
            if request in self._open:
                self._open.discard(request)
                self._places.release()
