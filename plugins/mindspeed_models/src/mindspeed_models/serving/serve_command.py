"""``mindspeed-models serve``: OpenAI's HTTP interface in front of one model."""

from __future__ import annotations

import ipaddress
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mindspeed_core.errors import ArgumentError, NamedFileError
from mindspeed_core.terminal.foreign_text import emit
from mindspeed_models.serving.model_options import ModelOptions, layout_command, model_of, model_options
from mindspeed_models.serving.settings import Limits

if TYPE_CHECKING:
    from mindspeed_models.inference.loaded import LoadedModel

_KEYS = "--api-key-file"
_SHORTEST_KEY = 16
_LIMIT = click.IntRange(1)


@layout_command("serve", "OpenAI's HTTP interface and a page to chat.")
@model_options
@click.option("--host", default="127.0.0.1", show_default=True, help=f"Address; another one needs {_KEYS}.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 for a free one."
)
@click.option(
    _KEYS, "key_file", metavar="FILE", help="Keys of clients, one a line; without it nobody needs one."
)
@click.option("--served-model-name", "name", help="Name of the model; that of its folder by default.")
@click.option("--max-batch", type=_LIMIT, default=16, show_default=True, help="Answers computed together.")
@click.option(
    "--max-waiting",
    type=_LIMIT,
    default=256,
    show_default=True,
    help="Answers that may wait; others get 429.",
)
@click.option("--max-tokens", type=_LIMIT, help="Most tokens of an answer; the model's positions by default.")
@click.option(
    "--max-choices", type=_LIMIT, default=16, show_default=True, help="Most answers to one request."
)
@click.option(
    "--max-body-bytes", type=_LIMIT, default=4 << 20, show_default=True, help="Longest body of a request."
)
@click.option(
    "--max-clients", type=_LIMIT, default=128, show_default=True, help="Clients connected at a time."
)
@click.option(
    "--client-timeout",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Seconds in which a request must arrive, and a piece of its answer be taken.",
)
@click.option("--quiet", is_flag=True, help="Log no requests.")
def serve_command(**given: Any) -> int | None:
    """Serve a model: /v1/models, /v1/completions, /v1/chat/completions, /health, and a page at /.

    FLAGS are further flags of the host. Under torchrun each rank runs this command; the first one listens.
    """
    options = model_of(given)
    keys = read_keys(given["key_file"])
    check_host(given["host"], keys)
    limits = Limits(
        waiting=given["max_waiting"],
        batch=given["max_batch"],
        new_tokens=given["max_tokens"],
        choices=given["max_choices"],
        body_bytes=given["max_body_bytes"],
        connections=given["max_clients"],
        read_seconds=given["client_timeout"],
        write_seconds=given["client_timeout"],
    )
    with options.open(limits.batch) as model:
        if not model.leader:
            with signals_ignored():
                model.follow()
            return None
        address = (given["host"], given["port"])
        say = None if given["quiet"] else emit
        serve(model, options, address, limits, keys=keys, name=given["name"], say=say)
    return None


def serve(
    model: LoadedModel,
    options: ModelOptions,
    address: tuple[str, int],
    limits: Limits,
    *,
    keys: tuple[bytes, ...] = (),
    name: str | None = None,
    say: Callable[[str], None] | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal ends it; answers that run then are cut short, with an error.

    Args:
        model: of the leader.
        options: how it was loaded.
        address: host and port.
        limits: of what clients may ask for.
        keys: of clients.
        name: of the model.
        say: takes a line for each request.
        ready: gets the address to open; by default it is printed.

    Raises:
        KeyboardInterrupt: Ctrl-C ended it, after everything was closed.
    """
    from mindspeed_models.serving.asked import Sizes
    from mindspeed_models.serving.server import Server
    from mindspeed_models.serving.waiting import answer_all

    sizes = Sizes(model.vocab_size, model.max_positions, options.names(name), tuple(model.adapters))
    server = Server(address, options.prompts(model), sizes, limits, keys=keys, say=say)
    ended = threading.Event()
    with _ended_by_signals(ended, server.line.close) as received:
        try:
            server.start()
            (ready or _announce)(server.url)
            answer_all(model, server.line, ended.is_set)
        finally:
            server.stop()
    if signal.SIGINT in received:
        raise KeyboardInterrupt


def read_keys(path: str | None) -> tuple[bytes, ...]:
    """Return the keys of a file: a line each, without blanks; lines that begin with # are none.

    Raises:
        NamedFileError: it cannot be read, holds none, or one that can be guessed.
    """
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise NamedFileError(_KEYS, path, f"cannot be read ({error})", "write a key in it") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise NamedFileError(_KEYS, path, "holds no key", "write one in a line of its own")
    for number, key in enumerate(keys, start=1):
        if len(key) < _SHORTEST_KEY or not key.isascii() or any(character.isspace() for character in key):
            reason = f"key {number} is shorter than {_SHORTEST_KEY} characters, or has blanks or accents"
            raise NamedFileError(_KEYS, path, reason, "draw one, for instance with openssl rand -hex 24")
    return tuple(key.encode() for key in keys)


def check_host(host: str, keys: tuple[bytes, ...]) -> None:
    """Refuse to listen beyond this machine without keys.

    Raises:
        ArgumentError: the host is not loopback, and there are no keys.
    """
    if keys or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ArgumentError(
            "--host", host, "anybody who reaches it could use the model", f"name keys with {_KEYS}"
        )


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Let a rank that follows end when the leader says so, and not by a signal to all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended_by_signals(ended: threading.Event, close: Callable[[str], None]) -> Iterator[list[int]]:
    """Close the line at the first signal; a second Ctrl-C interrupts at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def on_signal(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        ended.set()
        # The line's lock may be held by the very code that this handler interrupts.
        threading.Thread(target=close, args=("the server ends",), daemon=True).start()

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _announce(url: str) -> None:
    emit(f"serving at {url} (the page), {url}/v1 (OpenAI's interface); Ctrl-C ends it")
