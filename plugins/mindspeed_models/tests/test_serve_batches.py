"""Waiting requests are answered together; clients that go, and models that fail, harm nobody else."""

import http.client
import json
import threading

import pytest
from fake_model import FakeModel
from served import events, serving

from mindspeed_core.errors import UserError

LONG = "a cat and a dog ran to the house " * 8


def wait_for(condition, seconds=10.0):
    """Wait until something holds; an event that is never set is only a clock."""
    clock = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        clock.wait(0.01)
    raise AssertionError("it never held")


class Gate:
    """Holds the model before its first token until it is opened."""

    def __init__(self, model):
        self.opened = threading.Event()
        self.reached = threading.Event()
        model.on_step = self.step

    def step(self, number):
        self.reached.set()
        assert self.opened.wait(20)


def ask_all(served, count, **fields):
    """Ask from so many threads; returns the threads and the results, which they fill."""
    results = [None] * count

    def one(at):
        results[at] = served.complete(prompt=f"the cat {at}", max_tokens=8, **fields)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_requests_that_wait_share_a_batch(tmp_path):
    model = FakeModel(tmp_path / "m")
    gate = Gate(model)
    with serving(model, batch=8) as served:
        first, _ = ask_all(served, 1)
        assert gate.reached.wait(10)
        others, results = ask_all(served, 10)
        wait_for(lambda: len(served.server.line) == 10)
        assert served.ask("GET", "/health")[1] == {"status": "ok", "waiting": 10, "running": 1}
        gate.opened.set()
        for thread in first + others:
            thread.join()
    assert [status for status, _ in results] == [200] * 10
    assert model.batches == [1, 8, 2]


def test_equal_requests_do_not_share_a_batch(tmp_path):
    model = FakeModel(tmp_path / "m")
    gate = Gate(model)
    with serving(model) as served:
        first, _ = ask_all(served, 1)
        assert gate.reached.wait(10)
        threads = [
            threading.Thread(target=served.complete, kwargs={"prompt": "same", "seed": 1}) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(served.server.line) == 3)
        gate.opened.set()
        for thread in first + threads:
            thread.join()
    assert model.batches == [1, 1, 1, 1]


def test_a_full_line_is_said(tmp_path):
    model = FakeModel(tmp_path / "m")
    gate = Gate(model)
    with serving(model, waiting=2) as served:
        first, _ = ask_all(served, 1)
        assert gate.reached.wait(10)
        others, _ = ask_all(served, 2)
        wait_for(lambda: len(served.server.line) == 2)
        status, body = served.complete(prompt="one more")
        assert status == 429
        assert body["error"]["code"] == "queue_full"
        gate.opened.set()
        for thread in first + others:
            thread.join()


def open_stream(served, text=LONG):
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    body = json.dumps({"prompt": "the cat", "stream": True, "max_tokens": 200})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def test_a_client_that_goes_cancels_its_answer_alone(tmp_path):
    model = FakeModel(tmp_path / "m", lambda prompt: LONG)
    steps = []
    gone = threading.Event()

    def step(number):
        steps.append(number)
        if number == 3 and len(steps) < 10:
            assert gone.wait(20)

    model.on_step = step
    with serving(model) as served:
        connection = open_stream(served)
        answer = connection.getresponse()
        answer.fp.readline()
        answer.close()
        connection.close()
        handler_ended = lambda: not served.server._open  # noqa: E731
        wait_for(handler_ended)
        gone.set()
        wait_for(lambda: served.server.line.running == 0)
        total = len(model.tokenizer.tokenize(LONG))
        assert max(steps) < total - 5
        assert served.complete(prompt="another", max_tokens=5)[0] == 200


def test_a_client_that_goes_while_it_waits_is_never_computed(tmp_path):
    model = FakeModel(tmp_path / "m")
    gate = Gate(model)
    with serving(model) as served:
        first, _ = ask_all(served, 1)
        assert gate.reached.wait(10)
        connection = open_stream(served)
        wait_for(lambda: len(served.server.line) == 1)
        connection.close()
        wait_for(lambda: len(served.server._open) == 1)
        gate.opened.set()
        for thread in first:
            thread.join()
        assert served.complete(prompt="another", max_tokens=5)[0] == 200
    assert model.batches == [1, 1]


def test_a_request_that_the_model_refuses_leaves_the_others(tmp_path):
    model = FakeModel(tmp_path / "m")
    gate = Gate(model)
    bad = {}

    def failure(requests):
        wrong = [each for each in requests if each.settings.top_k == 13]
        bad.setdefault("ids", []).append(len(requests))
        return UserError("--prompt: too much for the cache") if wrong else None

    with serving(model) as served:
        first, _ = ask_all(served, 1)
        assert gate.reached.wait(10)
        model.failure = failure
        threads, results = ask_all(served, 4)
        wrong = []
        threads.append(threading.Thread(target=lambda: wrong.append(served.complete(prompt="bad", top_k=13))))
        threads[-1].start()
        wait_for(lambda: len(served.server.line) == 5)
        gate.opened.set()
        for thread in first + threads:
            thread.join()
    assert [status for status, _ in results] == [200] * 4
    ((status, body),) = wrong
    assert status == 400
    assert "too much for the cache" in body["error"]["message"]


def test_a_model_that_fails_ends_the_server_with_its_reason(tmp_path):
    model = FakeModel(tmp_path / "m")
    model.failure = lambda requests: RuntimeError("device lost")
    with serving(model) as served:
        status, body = served.complete(prompt="a")
        assert status == 500
        assert body["error"]["type"] == "server_error"
        wait_for(lambda: served.failure is not None)
        assert served.complete(prompt="a")[0] == 503
        assert served.ask("GET", "/health")[0] == 503
    assert isinstance(served.failure, RuntimeError)


def test_the_end_of_the_server_is_said_in_a_stream(tmp_path):
    model = FakeModel(tmp_path / "m", lambda prompt: LONG)
    gate = Gate(model)
    with serving(model) as served:
        begun = threading.Event()
        texts = []

        def read():
            connection = open_stream(served)
            begun.set()
            texts.append(connection.getresponse().read().decode())

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(10)
        assert gate.reached.wait(10)
        waiting, results = ask_all(served, 1)
        wait_for(lambda: len(served.server.line) == 1)
        served.ended.set()
        gate.opened.set()
        served.server.line.close("the server ends")
        reader.join()
        waiting[0].join()
    # It has no end that could be taken for that of a whole answer.
    assert "[DONE]" not in texts[0]
    assert "the server ends" in texts[0]
    assert results[0][0] == 503


def test_too_many_clients_are_turned_away(tmp_path):
    with serving(FakeModel(tmp_path / "m"), connections=2) as served:
        held = [http.client.HTTPConnection("127.0.0.1", served.port, timeout=10) for _ in range(2)]
        for connection in held:
            connection.connect()
        wait_for(lambda: len(served.server._open) == 2)
        assert served.ask("GET", "/health")[0] == 503
        for connection in held:
            connection.close()
        wait_for(lambda: not served.server._open)
        assert served.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize("count", [32])
def test_many_clients_at_once_are_all_answered(tmp_path, count):
    model = FakeModel(tmp_path / "m")
    with serving(model) as served:
        threads, results = ask_all(served, count)
        for thread in threads:
            thread.join()
    assert [status for status, _ in results] == [200] * count
    assert events("data: [DONE]\n\n") == ["[DONE]"]
