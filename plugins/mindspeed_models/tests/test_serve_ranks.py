"""The server in front of a real model: answers do not depend on the layout, and a signal ends every rank."""

import json
import signal

import pytest
from corpora import write_tokenizer
from served import events
from serving_runs import served
from tiny_models import make

from mindspeed_testing import run_world


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "llama"
    make("llama", root, vocab_size=400)
    return str(write_tokenizer(root))


@pytest.fixture(scope="module")
def alone(folder):
    (found,) = run_world(served, 1, folder, {}, signal.SIGTERM)
    return found


def test_one_process_answers_and_ends_in_order(alone):
    first, second = alone["drawn"]
    assert first == second != ""
    status, text = alone["stream"]
    pieces = events(text)
    assert status == 200
    assert pieces[-1] == "[DONE]"
    assert "".join(piece["choices"][0]["text"] for piece in pieces[:-1]) == first
    assert alone["chat"][0] == 200
    assert alone["wrong"][0] == 400
    assert alone["together"] == dict.fromkeys(range(6), 200)
    assert alone["ended"] == "in order"
    assert alone["left"] == []


@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}])
def test_two_ranks_answer_alike_and_end_together(folder, alone, options):
    leader, follower = run_world(served, 2, folder, options, signal.SIGINT)
    assert follower == {"followed": True}
    assert leader["drawn"] == alone["drawn"]
    chats = [json.loads(found["chat"][1])["choices"] for found in (leader, alone)]
    assert chats[0] == chats[1]
    assert leader["together"] == alone["together"]
    assert leader["ended"] == "interrupted"
    assert leader["left"] == []
