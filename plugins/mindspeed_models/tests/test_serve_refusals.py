"""Bad requests get one sentence and the right status, and harm nobody else."""

import json
import socket
import time

import pytest
from fake_model import FakeModel
from served import serving

from mindspeed_core.errors import ArgumentError
from mindspeed_models.serving.serve_command import check_host, read_keys
from mindspeed_train.interface import NullTokenizer


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = FakeModel(tmp_path_factory.mktemp("model"), max_positions=64)
    with serving(model, body_bytes=20_000, read_seconds=1.0, choices=4, new_tokens=50) as found:
        yield found


@pytest.fixture(scope="module")
def served_without_tokenizer(tmp_path_factory):
    model = FakeModel(tmp_path_factory.mktemp("model"), say=lambda prompt: "4 5")
    model.tokenizer = NullTokenizer(model.vocab_size)
    with serving(model) as found:
        yield found


BAD_FIELDS = [
    ({}, "prompt is missing"),
    ({"prompt": ""}, "no tokens"),
    ({"prompt": []}, "empty list"),
    ({"prompt": 7}, "neither text nor ids"),
    ({"prompt": [1, 10**9]}, "no token of the model"),
    ({"prompt": ["a", "b", "c", "d", "e"]}, "5 prompts, 4 at most"),
    ({"prompt": "the cat " * 60, "max_tokens": 2}, "exceed the model's 64 positions"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0, not a whole number from 1 to 50"),
    ({"prompt": "a", "max_tokens": 51}, "from 1 to 50"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens is true"),
    ({"prompt": "a", "temperature": -1}, "temperature is -1, not a number from 0 to 100"),
    ({"prompt": "a", "temperature": "hot"}, 'temperature is "hot"'),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5"),
    ({"prompt": "a", "top_p": 0}, "top_p 0.0: is no probability"),
    ({"prompt": "a", "n": 5}, "n is 5"),
    ({"prompt": ["a", "b", "c"], "n": 2}, "6 answers are asked for, 4 at most"),
    ({"prompt": "a", "stop": [""]}, "none of them empty"),
    ({"prompt": "a", "stream": "yes"}, 'stream is "yes", not true or false'),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "beside stream true"),
    ({"prompt": "a", "seed": -1}, "seed is -1"),
    ({"prompt": "a", "max_token": 5}, "max_token: there is no such field; did you mean 'max_tokens'?"),
    ({"prompt": "a", "suffix": "end"}, "suffix"),
    ({"prompt": "a", "best_of": 3}, "best_of 3"),
    ({"prompt": "a", "logprobs": 21}, "logprobs is 21, not a whole number from 0 to 20"),
    ({"prompt": "a", "logprobs": True}, "logprobs is true, not a whole number"),
    ({"prompt": "a", "presence_penalty": 0.5}, "there is repetition_penalty instead"),
    ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
    ({"prompt": "a", "min_tokens": 20, "max_tokens": 5}, "min_tokens"),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD_FIELDS)
def test_a_wrong_field_is_named(served, fields, sentence):
    status, body = served.complete(**fields)
    assert status == 400
    assert sentence in body["error"]["message"]
    assert "--" not in body["error"]["message"]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "no JSON"),
        (b"[1]", "an object is asked for"),
        (b"\xff\xfe", "no UTF-8"),
        (b"[" * 15000, "no JSON"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "\\ud800"}', "half a character"),
        (b"", "no JSON"),
    ],
)
def test_a_damaged_body_is_refused(served, body, sentence):
    status, answer = served.ask("POST", "/v1/completions", body)
    assert status == 400
    assert sentence in answer["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        (None, "messages is missing"),
        ([], "no list of messages"),
        ("hi", "no list of messages"),
        ([{"role": "wizard", "content": "hi"}], "'wizard'"),
        ([{"role": "user"}], "no text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "something else than text"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "the assistant's"),
        ([{"role": "system", "content": "a"}], "no question"),
        ([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], "not the first"),
        ([{"role": "user", "content": "the cat " * 80}], "the model has 64 positions"),
    ],
)
def test_a_wrong_conversation_is_refused(served, messages, sentence):
    status, body = served.ask("POST", "/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert sentence in body["error"]["message"]


def test_another_model_is_not_served(served):
    status, body = served.complete(model="gpt-4", prompt="a")
    assert status == 404
    assert "there is tiny" in body["error"]["message"]
    assert body["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("PUT", "/v1/completions", 405),
        ("DELETE", "/v1/models/tiny", 405),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/[", 404),
        ("POST", "/v1/embeddings", 404),
    ],
)
def test_other_paths_and_methods_are_refused(served, method, path, status):
    found, body = served.ask(method, path, {} if method == "POST" else None)
    assert found == status
    assert "error" in body


def test_the_type_of_the_body_is_checked(served):
    status, body = served.ask("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})
    assert status == 415
    assert "application/json" in body["error"]["message"]


def test_a_huge_body_is_refused_before_it_is_read(served):
    status, body = served.ask("POST", "/v1/completions", b" " * 200_000)
    assert status == 413
    assert "20000" in body["error"]["message"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Length: -5", b"400"),
        ("Content-Length: 1e3", b"400"),
        ("Content-Length: 5\r\nContent-Length: 6", b"400"),
        ("Transfer-Encoding: chunked", b"411"),
        ("X: y", b"411"),
    ],
)
def test_a_body_without_a_plain_length_is_refused(served, header, status):
    answer = raw(served, f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n".encode())
    assert answer.split(b" ", 2)[1] == status


def test_what_is_no_http_is_refused(served):
    assert b"400" in raw(served, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n").split(b"\r\n")[0]
    assert raw(served, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n").split(b" ", 2)[1] == b"431"
    assert raw(served, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n").split(b" ", 2)[1] == b"414"


def test_a_slow_body_is_given_up(served):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    began = time.monotonic()
    answer = raw(served, head + b"Content-Length: 100\r\n\r\n{", finish=False)
    assert answer.split(b" ", 2)[1] == b"408"
    assert time.monotonic() - began < 60


def test_a_slow_head_is_given_up(served):
    began = time.monotonic()
    raw(served, b"GET /health HTTP/1.1\r\nHost: loc", finish=False)
    assert time.monotonic() - began < 60


def test_a_page_of_another_site_is_not_answered(served):
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        status, body = served.ask("POST", "/v1/completions", {"prompt": "a"}, headers)
        assert status == 403
        assert "evil.example" in body["error"]["message"]
    assert served.ask("GET", "/health", headers={"Origin": f"http://127.0.0.1:{served.port}"})[0] == 200


def test_everybody_else_is_still_answered(served):
    assert served.complete(prompt="the cat", max_tokens=4)[0] == 200


def test_a_key_is_asked_for_where_there_are_keys(tmp_path):
    with serving(FakeModel(tmp_path / "m"), keys=(b"k" * 20, b"l" * 20)) as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic " + "k" * 20}):
            status, body = served.ask("POST", "/v1/completions", {"prompt": "a"}, headers)
            assert status == 401
            assert "Bearer KEY" in body["error"]["message"]
            assert served.ask("GET", "/v1/models", headers=headers)[0] == 401
        for key in ("k" * 20, "l" * 20):
            status, _ = served.ask(
                "POST", "/v1/completions", {"prompt": "a"}, {"Authorization": f"Bearer {key}"}
            )
            assert status == 200
        assert served.ask("GET", "/health")[0] == 200
        assert not any("k" * 20 in line for line in served.log)


def test_a_host_beyond_this_machine_needs_keys():
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org", ""):
        with pytest.raises(ArgumentError, match="--api-key-file"):
            check_host(host, ())
        check_host(host, (b"k",))
    for host in ("127.0.0.1", "::1", "localhost"):
        check_host(host, ())


@pytest.mark.parametrize(
    ("content", "reason"),
    [("", "holds no key"), ("# none\n\n", "holds no key"), ("short\n", "shorter than 16")],
)
def test_a_file_of_keys_is_checked(tmp_path, content, reason):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ArgumentError, match=reason):
        read_keys(str(file))
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"))


def test_a_port_in_use_is_one_sentence(tmp_path):
    model = FakeModel(tmp_path / "m")
    with serving(model) as served:
        from mindspeed_models.serving.server import Server

        with pytest.raises(ArgumentError, match=f"--port '{served.port}': cannot listen there"):
            Server(
                ("127.0.0.1", served.port), served.server.prompts, served.server.sizes, served.server.limits
            )
        with pytest.raises(ArgumentError, match="--host"):
            Server(
                ("no.such.host.invalid", 0), served.server.prompts, served.server.sizes, served.server.limits
            )


def raw(served, content: bytes, *, finish: bool = True) -> bytes:
    """Send bytes as they are; returns what comes until the server closes."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=10) as connection:
        try:
            connection.sendall(content)
            if finish:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        answer = b""
        while True:
            try:
                piece = connection.recv(65536)
            except ConnectionError:
                return answer
            if not piece:
                return answer
            answer += piece


def test_errors_have_openais_form(served):
    _, body = served.complete(prompt="a", n=99)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == "n"
    json.dumps(body)


def test_text_without_a_tokenizer_is_refused_and_ids_are_not(served_without_tokenizer):
    status, body = served_without_tokenizer.complete(prompt="two three")
    assert status == 400
    assert "without a tokenizer a prompt is ids" in body["error"]["message"]
    assert served_without_tokenizer.complete(prompt="2 3", max_tokens=1)[0] == 200


def test_messages_without_a_tokenizer_are_refused(served_without_tokenizer):
    status, body = served_without_tokenizer.chat("two")
    assert status == 400
    assert "messages need a tokenizer" in body["error"]["message"]
