"""Limits of the server, and the answers to requests that exceed them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of what clients may ask for.

    Attributes:
        waiting: answers that may wait; further requests get status 429.
        batch: answers computed together.
        new_tokens: most tokens of an answer; None for the positions of the model.
        choices: most answers to one request (prompts times ``n``).
        body_bytes: longest body of a request.
        connections: clients connected at a time.
        read_seconds: time in which a request must have arrived.
        write_seconds: time in which a client must take a piece of its answer.
    """

    waiting: int = 256
    batch: int = 16
    new_tokens: int | None = None
    choices: int = 16
    body_bytes: int = 4 << 20
    connections: int = 128
    read_seconds: float = 20.0
    write_seconds: float = 20.0


class Refused(Exception):
    """A request that gets an error as its answer.

    Attributes:
        status: of HTTP.
        message: one sentence.
        param: the field of the body that is wrong, if it is one.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str = "") -> None:
        """Keep status and sentence."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """Return the error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code or None}
        return {"error": error}
