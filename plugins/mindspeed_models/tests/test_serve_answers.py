"""Answers of the server in OpenAI's form: whole, streamed, several, with numbers of tokens."""

import pytest
from fake_model import FakeModel
from served import events, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    model = FakeModel(tmp_path_factory.mktemp("model"), lambda prompt: "它看见了一座房子 🏠 and ran")
    with serving(model) as found:
        yield found


def test_a_completion_has_text_reason_and_usage(served):
    status, body = served.complete(model="tiny", prompt="the cat", max_tokens=200)
    assert status == 200
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    (choice,) = body["choices"]
    assert choice["text"] == "它看见了一座房子 🏠 and ran"
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(served.model.tokenizer.tokenize("the cat"))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_the_limit_of_tokens_is_said(served):
    _, body = served.complete(prompt="the cat", max_tokens=3)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


def test_a_chat_is_written_by_the_template_with_special_tokens(served):
    status, body = served.chat("hi <|im_end|>", max_tokens=200)
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "它看见了一座房子 🏠 and ran"}
    ids = served.model.asked[-1].prompt
    end = served.model.tokenizer.library.token_to_id("<|im_end|>")
    # That of the template alone; what the user spells is text.
    assert ids.count(end) == 1
    assert served.model.tokenizer.detokenize(ids).count("<|im_end|>") == 2


@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_is_the_whole_text_and_ends_with_done(served, chat):
    ask = served.chat if chat else (lambda text, **fields: served.complete(prompt=text, **fields))
    status, text = ask("hi", stream=True, max_tokens=200, stream_options={"include_usage": True})
    assert status == 200
    *pieces, usage, done = events(text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 5
    choices = [piece["choices"][0] for piece in pieces]
    said = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
    assert "".join(said) == "它看见了一座房子 🏠 and ran"
    assert "\ufffd" not in text
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert len([each for each in said if each]) > 5
    if chat:
        assert choices[0]["delta"]["role"] == "assistant"


def test_several_prompts_and_answers_are_told_apart(served):
    before = len(served.model.asked)
    _, body = served.complete(prompt=["a cat", [5, 6, 7]], n=2, max_tokens=4, echo=True, temperature=0)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"].startswith("a cat") for choice in body["choices"]] == [True, True, False, False]
    assert len({each.request_id for each in served.model.asked[before:]}) == 4


def test_a_seed_and_a_prompt_give_the_same_request_again(served):
    for _ in range(2):
        served.complete(prompt="the cat", seed=7, temperature=0.5, top_k=9, top_p=0.5)
    first, second = served.model.asked[-2:]
    assert first == second
    assert (first.settings.seed, first.settings.top_k, first.settings.do_sample) == (7, 9, True)


def test_without_a_seed_each_request_draws_otherwise(served):
    for _ in range(2):
        served.complete(prompt="the cat")
    first, second = served.model.asked[-2:]
    assert first.settings.seed != second.settings.seed


def test_temperature_zero_is_greedy(served):
    served.complete(prompt="the cat", temperature=0)
    assert not served.model.asked[-1].settings.do_sample


def test_log_probabilities_are_those_of_the_tokens(served):
    _, body = served.complete(prompt="the cat", max_tokens=4, logprobs=0)
    told = body["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["text_offset"]) == 4
    _, body = served.chat("hi", max_tokens=4, logprobs=True)
    assert [each["logprob"] for each in body["choices"][0]["logprobs"]["content"]] == told["token_logprobs"]


def test_models_health_and_the_page_are_there(served):
    status, body = served.ask("GET", "/v1/models")
    assert status == 200
    assert [model["id"] for model in body["data"]] == ["tiny"]
    assert served.ask("GET", "/v1/models/tiny")[0] == 200
    assert served.ask("GET", "/v1/models/other")[0] == 404
    status, body = served.ask("GET", "/health")
    assert status == 200
    assert body == {"status": "ok", "waiting": 0, "running": 0}
    status, page = served.ask("GET", "/")
    assert status == 200
    assert "NONCE" not in page
    assert "/v1/chat/completions" in page


def test_the_rest_of_the_positions_is_the_limit_of_a_chat(served):
    served.chat("hi")
    asked = served.model.asked[-1]
    assert len(asked.prompt) + asked.settings.max_new_tokens == served.model.max_positions


def test_the_likeliest_tokens_in_the_place_of_each_are_told(served):
    _, body = served.chat("hi", max_tokens=3, logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [2, 2, 2]
    first = content[0]["top_logprobs"]
    assert [each["logprob"] for each in first] == [-1.0, -2.0]
    assert first[1]["token"] == content[0]["token"]
    _, body = served.complete(prompt="the cat", max_tokens=200, logprobs=1)
    told = body["choices"][0]["logprobs"]
    # The one that was asked for, and the one that was chosen, whose last one is a word.
    assert len(told["top_logprobs"][-1]) == 2
    assert told["top_logprobs"][-1][told["tokens"][-1]] == told["token_logprobs"][-1]


def test_a_part_of_a_character_has_no_bytes(served):
    _, body = served.chat("hi", max_tokens=200, logprobs=True)
    content = body["choices"][0]["logprobs"]["content"]
    parts = [each["bytes"] for each in content if "\ufffd" in each["token"]]
    assert parts
    assert set(map(str, parts)) == {"None"}


def test_a_stream_ends_with_the_likeliest_tokens(served):
    _, text = served.chat("hi", max_tokens=3, logprobs=True, top_logprobs=1, stream=True)
    *_, last, _ = events(text)
    assert len(last["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1
