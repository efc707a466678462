"""One connection of a client: reads requests, checks who asks, and sends answers whole or piece by piece."""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from mindspeed_core.terminal.foreign_text import shown
from mindspeed_models.inference.requests import Generated
from mindspeed_models.serving.answers import DONE, Answer, error_event
from mindspeed_models.serving.asked import Asked, read_chat, read_completion
from mindspeed_models.serving.fields import read_object
from mindspeed_models.serving.settings import Refused
from mindspeed_models.serving.waiting import Choice, Event

_LOOK_SECONDS = 0.2
"""Time between two looks whether a client that waits is still there."""
_DRAIN_SECONDS = 1.0
_LOCAL = ("localhost", "127.0.0.1", "::1")
_JSON = "application/json"
READERS = {"/v1/completions": read_completion, "/v1/chat/completions": read_chat}


class ClientGone(Exception):
    """The client has closed its connection."""


class Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: Any
    """The `Server`, whose module imports this one."""
    protocol_version = "HTTP/1.1"
    server_version = "mindspeed-models"
    sys_version = ""

    def setup(self) -> None:
        """Begin a connection."""
        super().setup()
        self.connection.settimeout(self.server.limits.write_seconds)

    def handle_one_request(self) -> None:
        """Serve one request, which must arrive in time."""
        self.server.deadlines.begin(self.connection, self.server.limits.read_seconds)
        try:
            super().handle_one_request()
        except (ClientGone, ConnectionError, TimeoutError):
            self.close_connection = True
        finally:
            self.server.deadlines.end(self.connection)

    def parse_request(self) -> bool:
        """Read the head of a request; one that was too slow gets status 408."""
        if not super().parse_request():
            return False
        length = self.headers.get("Content-Length", "0")
        if self.command not in ("GET", "HEAD", "POST") or (self.command != "POST" and length != "0"):
            self._refuse(Refused(405, f"{shown(self.command, 20)} is not answered here; use GET or POST"))
            return False
        return True

    def handle_expect_100(self) -> bool:
        """Ask for the body after its length is known to be allowed."""
        try:
            self._body_length()
        except Refused as reason:
            self._refuse(reason)
            return False
        return super().handle_expect_100()

    def do_HEAD(self) -> None:
        """Answer like GET, without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer the page, the state of the server, or the list of models."""
        self.server.deadlines.end(self.connection)
        self._guarded(self._get)

    def do_POST(self) -> None:
        """Answer a completion."""
        self._guarded(self._post)

    def _guarded(self, method: Callable[[str], None]) -> None:
        try:
            self._check_place()
            try:
                path = urlsplit(self.path).path
            except ValueError as error:
                raise Refused(400, f"{shown(self.path, 80)} is no path") from error
            method(path)
        except Refused as reason:
            self._refuse(reason)
        except (ClientGone, OSError):
            raise
        except Exception:
            # A fault of ours: the client learns that there is one, the log says which.
            with suppress(OSError):
                self._refuse(Refused(500, "the server failed on this request", code="fault"))
            raise

    def _get(self, path: str) -> None:
        if path == "/":
            self._send_page()
        elif path == "/health":
            state = self.server.state()
            self._send(200 if state["status"] == "ok" else 503, state)
        elif path == "/v1/models":
            self._check_key()
            self._send(200, {"object": "list", "data": self.server.models()})
        elif path.startswith("/v1/models/"):
            self._check_key()
            self._send_model(unquote(path.removeprefix("/v1/models/")))
        elif path in READERS:
            raise Refused(405, f"{path} is asked with POST")
        else:
            raise Refused(404, f"{shown(path, 80)} is not here; see /v1/models and /")

    def _post(self, path: str) -> None:
        if path not in READERS:
            raise Refused(404, f"{shown(path, 80)} is not here; use {' or '.join(READERS)}")
        self._check_key()
        body = self._read_body()
        if self.server.deadlines.end(self.connection):
            raise Refused(408, f"the body took more than {self.server.limits.read_seconds:g} s")
        server = self.server
        self._answer(READERS[path](read_object(body), server.prompts, server.sizes, server.limits))

    def _answer(self, asked: Asked) -> None:
        gone = threading.Event()
        events: SimpleQueue[Event] = SimpleQueue()
        choices = [Choice(request, at, events, gone) for at, request in enumerate(asked.requests)]
        self.server.line.put(choices)
        answer = Answer(asked, self.server.prompts)
        try:
            if asked.stream:
                self._stream(answer, events)
            else:
                self._send(200, answer.whole(self._results(len(choices), events)))
        finally:
            # After the last event this changes nothing; before it nobody waits for the rest.
            gone.set()

    def _results(self, count: int, events: SimpleQueue[Event]) -> list[Generated]:
        results: dict[int, Generated] = {}
        while len(results) < count:
            index, event = self._next(events)
            if isinstance(event, Refused):
                raise event
            if isinstance(event, Generated):
                results[index] = event
        return [results[index] for index in range(count)]

    def _stream(self, answer: Answer, events: SimpleQueue[Event]) -> None:
        """Send events as they come; the status waits for the first, which may be a refusal."""
        count = len(answer.asked.requests)
        first = self._next(events)
        if isinstance(first[1], Refused):
            raise first[1]
        self._begin_stream()
        for index in range(count):
            opening = answer.opening(index)
            if opening is not None:
                self._write(opening)
        sent = [0] * count
        results: dict[int, Generated] = {}
        event: Event | None = first
        while len(results) < count:
            index, content = event if event is not None else self._next(events)
            event = None
            if isinstance(content, Refused):
                self._write(error_event(content.body()))
                return
            if isinstance(content, str):
                sent[index] += len(content)
                self._write(answer.text(index, content))
                continue
            if rest := content.text[sent[index] :]:
                self._write(answer.text(index, rest))
            results[index] = content
            self._write(answer.end(index, content))
        if answer.asked.usage:
            self._write(answer.usage_event([results[index] for index in range(count)]))
        self._write(DONE)

    def _next(self, events: SimpleQueue[Event]) -> Event:
        while True:
            try:
                return events.get(timeout=_LOOK_SECONDS)
            except Empty:
                if self._left():
                    raise ClientGone from None

    def _left(self) -> bool:
        """Return whether the client has closed; one that only ended its sending side counts as gone, too."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _check_place(self) -> None:
        """Refuse pages of other sites, which a browser on this machine would let ask a server on loopback."""
        if self.server.keys:
            return
        host = self.headers.get("Host", "")
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            name = ""
        if name not in _LOCAL:
            raise Refused(403, f"Host {shown(host, 80)!r} is not this machine; use http://127.0.0.1")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise Refused(403, f"Origin {shown(origin, 80)!r}: pages of other sites are not answered")

    def _check_key(self) -> None:
        keys = self.server.keys
        if not keys:
            return
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        offered = given.strip().encode("utf-8", "replace")
        # All are compared, so that the time says nothing.
        right = [hmac.compare_digest(offered, key) for key in keys]
        if kind.lower() != "bearer" or not any(right):
            raise Refused(
                401, "the key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    def _body_length(self) -> int:
        if self.headers.get("Transfer-Encoding"):
            raise Refused(411, "a body in chunks is not read; send Content-Length")
        if len(self.headers.get_all("Content-Length", [])) > 1:
            raise Refused(400, "Content-Length is given twice")
        text = self.headers.get("Content-Length")
        if text is None:
            raise Refused(411, "Content-Length is missing")
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise Refused(400, f"Content-Length {shown(text, 30)!r} is no length")
        if int(text) > self.server.limits.body_bytes:
            raise Refused(
                413, f"the body has {int(text)} bytes, --max-body-bytes is {self.server.limits.body_bytes}"
            )
        return int(text)

    def _read_body(self) -> bytes:
        length = self._body_length()
        kind = self.headers.get("Content-Type", "")
        if kind.partition(";")[0].strip().lower() != _JSON:
            raise Refused(415, f"Content-Type {shown(kind, 60)!r}: send {_JSON}")
        body = self.rfile.read(length)
        if len(body) < length:
            if self.server.deadlines.end(self.connection):
                raise Refused(408, f"the body took more than {self.server.limits.read_seconds:g} s")
            raise ClientGone
        return body

    def _begin_stream(self) -> None:
        # The end of a stream is its last event; the connection closes after it.
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()

    def _write(self, content: bytes) -> None:
        self.wfile.write(content)

    def _send_model(self, name: str) -> None:
        found = next((model for model in self.server.models() if model["id"] == name), None)
        if found is None:
            raise Refused(404, f"model {shown(name, 80)!r} is not served here", code="model_not_found")
        self._send(200, found)

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        content = self.server.page.replace("NONCE", nonce).encode()
        self._send_bytes(200, content, "text/html; charset=utf-8", {"Content-Security-Policy": policy})

    def _send(self, status: int, value: Any) -> None:
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        self._send_bytes(status, json.dumps(value, ensure_ascii=False).encode(), _JSON, headers)

    def _send_bytes(self, status: int, content: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
            **headers,
        }.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if getattr(self, "command", None) != "HEAD":
            self.wfile.write(content)

    def _refuse(self, reason: Refused) -> None:
        """Send an error. The rest of a body is not read as the next request: the connection ends."""
        self.close_connection = True
        # Where the first line cannot be read the base class takes the client for one that knows no headers.
        self.request_version = self.protocol_version
        self._send(reason.status, reason.body())
        self._drain()

    def _drain(self) -> None:
        """Take what the client still sends for a moment, so that it can read the answer."""
        with suppress(OSError, ValueError):
            self.connection.shutdown(socket.SHUT_WR)
            end = time.monotonic() + _DRAIN_SECONDS
            while (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if not self.connection.recv(1 << 16):
                    return

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error that the base class finds in the head of a request."""
        late = self.server.deadlines.end(self.connection)
        reason = Refused(408, "the request took too long") if late else None
        self._refuse(reason or Refused(int(code), shown(message or "the request cannot be read")))

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request where the server is asked to."""
        if self.server.say is not None:
            self.server.say(f"{self.client_address[0]} {format % args}")
