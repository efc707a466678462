"""A server in front of a fake model, in threads of the test."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fake_model import FakeModel

from mindspeed_models.serving.asked import Sizes
from mindspeed_models.serving.prompts import load_prompts
from mindspeed_models.serving.server import Server
from mindspeed_models.serving.settings import Limits
from mindspeed_models.serving.waiting import answer_all


class Served:
    """A running server and how to ask it."""

    def __init__(self, model: FakeModel, server: Server) -> None:
        self.model = model
        self.server = server
        self.port = int(server.server_address[1])
        self.ended = threading.Event()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._answer)
        self.log: list[str] = []

    def _answer(self) -> None:
        try:
            answer_all(self.model, self.server.line, self.ended.is_set)
        except BaseException as error:
            self.failure = error

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Ask once; returns the status and the JSON or text of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            kind = {"Content-Type": "application/json"} if raw is not None else {}
            connection.request(method, path, raw, {**kind, **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
            if answer.headers.get_content_type() == "application/json" and content:
                return answer.status, json.loads(content)
            return answer.status, content.decode()
        finally:
            connection.close()

    def complete(self, **fields: Any) -> tuple[int, Any]:
        """Ask for a completion."""
        return self.ask("POST", "/v1/completions", fields)

    def chat(self, *contents: str, **fields: Any) -> tuple[int, Any]:
        """Ask for the answer to a conversation that the user begins."""
        roles = ("user", "assistant")
        messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]
        return self.ask("POST", "/v1/chat/completions", {"messages": messages, **fields})


@contextmanager
def serving(model: FakeModel, keys: tuple[bytes, ...] = (), **limits: Any) -> Iterator[Served]:
    """Serve a model on a free port until the block ends."""
    log: list[str] = []
    prompts = load_prompts(model, model.folder, None)
    sizes = Sizes(model.vocab_size, model.max_positions, ("tiny",))
    server = Server(("127.0.0.1", 0), prompts, sizes, Limits(**limits), keys=keys, say=log.append)
    served = Served(model, server)
    served.log = log
    server.start()
    served.thread.start()
    try:
        yield served
    finally:
        served.ended.set()
        server.stop(2)
        served.thread.join(10)
        assert not served.thread.is_alive()


def events(text: str) -> list[Any]:
    """The events of a stream; the last is ``[DONE]``."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
