"""A server in front of a model of several ranks, asked by threads of the first, ended by a signal."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit


def ask(url: str, path: str, **fields: Any) -> tuple[int, str]:
    """Ask once; returns the status and the text of the answer."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def served(folder: str, options: dict[str, Any], number: int) -> dict[str, Any]:
    """Serve under a layout; returns the answers to a few requests, and how it ended."""
    from mindspeed_models.serving.model_options import ModelOptions
    from mindspeed_models.serving.serve_command import serve, signals_ignored
    from mindspeed_models.serving.settings import Limits

    given = ModelOptions(folder, chat_template="chatml", **options)
    found: dict[str, Any] = {"threads": threading.active_count()}
    with given.open(batch_size=4) as model:
        if not model.leader:
            with signals_ignored():
                model.follow()
            return {"followed": True}

        def ask_all(url: str) -> None:
            try:
                common = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
                found["drawn"] = [
                    json.loads(ask(url, "/v1/completions", prompt="the cat", **common)[1])["choices"][0][
                        "text"
                    ]
                    for _ in range(2)
                ]
                found["stream"] = ask(url, "/v1/completions", prompt="the cat", stream=True, **common)
                messages = [{"role": "user", "content": "where is it"}]
                found["chat"] = ask(
                    url, "/v1/chat/completions", messages=messages, max_tokens=8, temperature=0
                )
                found["wrong"] = ask(url, "/v1/completions", prompt="a", n=99)
                together = [
                    threading.Thread(
                        target=lambda n=n: found.setdefault("together", {}).update(
                            {n: ask(url, "/v1/completions", prompt=f"the cat {n}", **common)[0]}
                        )
                    )
                    for n in range(6)
                ]
                for thread in together:
                    thread.start()
                for thread in together:
                    thread.join()
            finally:
                os.kill(os.getpid(), number)

        def ready(url: str) -> None:
            threading.Thread(target=ask_all, args=(url,)).start()

        try:
            serve(model, given, ("127.0.0.1", 0), Limits(batch=4), name="tiny", ready=ready)
            found["ended"] = "in order"
        except KeyboardInterrupt:
            found["ended"] = "interrupted"
    end = time.monotonic() + 10
    while threading.active_count() > found["threads"] and time.monotonic() < end:
        time.sleep(0.01)
    found["left"] = sorted(thread.name for thread in threading.enumerate())[found["threads"] :]
    found["handler"] = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return found
