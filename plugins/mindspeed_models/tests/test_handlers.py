"""Handlers: each of AscendSpeed's record formats becomes the text and the samples that it becomes there."""

import pytest
from corpora import write_tokenizer

from mindspeed_core.errors import ArgumentError
from mindspeed_models.data.conversation import ASSISTANT, FORMATS, SYSTEM, TOOL, USER, BadRecord
from mindspeed_models.data.encoding import IGNORED
from mindspeed_models.data.handlers import HANDLERS, handler_of
from mindspeed_models.data.tokenizers import TokenizerChoice, load_encoder

MOSS = {
    "chat": {
        "turn_1": {"Human": "<|Human|>: hi<eoh>\n", "MOSS": "<|MOSS|>: hello<eom>\n"},
        "turn_2": {"Human": "<|Human|>: more<eoh>\n", "MOSS": "<|MOSS|>: enough<eom>\n"},
        "turn_3": None,
    }
}


def said(handler, record):
    return [[(m.role, m.content) for m in each] for each in HANDLERS[handler].read(record)]


def test_a_question_and_its_input_are_two_lines():
    record = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert said("GeneralInstructionHandler", record) == [[(USER, "Add\n1 2"), (ASSISTANT, "3")]]
    # Without an input the line is empty, as in AscendSpeed.
    assert said("GeneralInstructionHandler", {**record, "input": ""})[0][0] == (USER, "Add\n")


def test_the_history_of_belle_becomes_turns():
    record = {"instruction": "Human:hi\nAssistant:hello\nHuman:more\nAssistant:\n", "output": "enough\n"}
    assert said("BelleMultiTurnInstructionHandler", record) == [
        [(USER, "hi"), (ASSISTANT, "hello"), (USER, "more"), (ASSISTANT, "enough")]
    ]
    with pytest.raises(BadRecord, match="open Assistant:"):
        said("BelleMultiTurnInstructionHandler", {"instruction": "Human:hi\nAssistant:ho", "output": "x"})


def test_every_prefix_of_moss_is_a_sample():
    turns = [(USER, "hi"), (ASSISTANT, "hello"), (USER, "more"), (ASSISTANT, "enough")]
    assert said("MOSSInstructionHandler", MOSS) == [turns[:2], turns]


def test_moss_at_once_learns_to_end_before_the_next_question(tmp_path):
    encoder = load_encoder(TokenizerChoice(path=str(write_tokenizer(tmp_path))))
    (sample,) = HANDLERS["MOSSMultiTurnHandler"].encode(MOSS, encoder)
    hi, hello, more, enough = encoder.texts(["hi", "hello", "more", "enough"])
    eod = encoder.eod
    assert sample.ids == [195, *hi, 196, *hello, 195, *more, 196, *enough, eod]
    hidden = [IGNORED]
    assert sample.labels == [
        eod,
        *hidden * (len(hi) + 1),
        *hello,
        eod,
        *hidden * (len(more) + 1),
        *enough,
        eod,
    ]


def test_the_question_of_leetcode_ends_at_its_code():
    record = {"code_with_problem": "Sum.\n```python\nx", "code_only": "x", "explanation_only": "why"}
    assert said("LeetcodePythonInstructionHandler", record) == [[(USER, "Sum."), (ASSISTANT, "x\nwhy")]]


def test_texts_of_pretraining_handlers():
    record = {"title": "T", "question_body": "Q", "answer_body": "A"}
    handler = HANDLERS["StackOverflowPythonPretrainHandler"]
    assert handler.texts(record, ("text",)) == ["In python, T\n### Question:\nQ\n### Response:\nA\n"]
    alpaca = HANDLERS["AlpacaPretrainHandler"]
    (text,) = alpaca.texts({"instruction": "I", "input": "", "output": "O"}, ("text",))
    assert text.endswith("### Instruction:\nI\n\n###\n\n### Response: ASSISTANT: O")
    assert "None" not in text
    (text,) = alpaca.texts({"instruction": "I", "input": "X", "output": "O"}, ("text",))
    assert "### Input:\nX\n\n### Response" in text
    both = HANDLERS["GeneralPretrainHandler"].texts({"a": "x", "b": "y", "c": 1}, ("b", "a"))
    assert both == ["y", "x"]


def test_formats_of_conversations():
    turns = [(USER, "q"), (ASSISTANT, "a")]

    def read(name, record):
        return [(m.role, m.content) for m in FORMATS[name](record)]

    alpaca = {"instruction": "q", "output": "a", "history": [["h", "i"]], "system": "s"}
    assert read("alpaca", alpaca) == [(SYSTEM, "s"), (USER, "h"), (ASSISTANT, "i"), *turns]
    shared = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    assert read("sharegpt", shared) == turns
    parts = [{"type": "text", "text": "q"}]
    called = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "a"},
    ]
    assert read("openai", {"messages": called}) == [turns[0], (ASSISTANT, "call"), (TOOL, "7"), turns[1]]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("assistant", "a")], "first message is not the user's"),
        ([("user", "q"), ("user", "q"), ("assistant", "a")], "a message of user follows one of user"),
        ([("user", "q"), ("assistant", " ")], "an answer is empty"),
        ([("user", "q")], "the last message is not the assistant's"),
        ([("user", "q"), ("assistant", "a"), ("system", "s")], "a system message is not the first"),
        ([("user", "q"), ("robot", "a")], "message 2 has the role 'robot'"),
        ([("user", 3), ("assistant", "a")], "message 1 has no text"),
    ],
)
def test_conversations_out_of_order_are_refused(messages, reason):
    record = {"messages": [{"role": role, "content": content} for role, content in messages]}
    with pytest.raises(BadRecord, match=reason):
        FORMATS["openai"](record)


def test_an_unknown_handler_is_refused_with_the_nearest_name():
    with pytest.raises(ArgumentError, match="did you mean GeneralInstructionHandler"):
        handler_of("GeneralInstructionsHandler", None)
    with pytest.raises(ArgumentError, match="use one of GeneralPretrainHandler"):
        handler_of("zzz", None)
    with pytest.raises(ArgumentError, match="drop one of the two"):
        handler_of("MOSSInstructionHandler", "alpaca")
    assert handler_of("", None).name == "GeneralPretrainHandler"
    assert len(HANDLERS) == 8


def test_a_record_without_its_fields_is_told_what_it_has():
    with pytest.raises(BadRecord, match=r"'output' is missing \(the record has instruction, answer\)"):
        list(HANDLERS["GeneralInstructionHandler"].read({"instruction": "q", "answer": "a"}))
