"""Settings of a generation: what cannot work is one sentence with flag, value and the way out."""

import pytest

from mindspeed_core.errors import ArgumentError
from mindspeed_models.inference.prompt_files import answered
from mindspeed_models.inference.requests import GenerationSettings, check_prompt

SIZES = {"vocab_size": 250, "max_positions": 128}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "--temperature -0.1: is no temperature"),
        ({"temperature": float("nan")}, "--temperature nan"),
        ({"top_p": 0.0}, "--top-p 0.0: is no probability"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"top_k": -1}, "--top-k -1"),
        ({"num_beams": 0}, "--num-beams 0"),
        ({"num_beams": 126}, "--num-beams 126: each step compares 252 candidates"),
        ({"num_beams": 2, "num_return_sequences": 3}, "--num-return-sequences 3"),
        ({"num_beams": 2, "logprobs": 1}, "--logprobs 1"),
        ({"max_new_tokens": -1}, "--max-new-tokens -1"),
        ({"max_new_tokens": 128}, "--max-new-tokens 128: the model has 128 positions"),
        ({"max_length": 0}, "--max-length 0"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "--min-new-tokens 4: is more than"),
        ({"eos_token_ids": (250,)}, "--eos-token-id 250: is no token of the model"),
        ({"stop": ("",)}, "--stop"),
        ({"seed": -1}, "--seed -1"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0"),
        ({"logprobs": 251}, "--logprobs 251"),
    ],
)
def test_a_value_that_cannot_work_is_refused(values, words):
    with pytest.raises(ArgumentError, match="^" + words.replace(".", r"\.")) as caught:
        GenerationSettings(**values).validate(**SIZES)
    assert caught.value.remedy


def test_beams_cannot_be_streamed():
    with pytest.raises(ArgumentError, match="--stream: beam search knows its text at the end only"):
        GenerationSettings(num_beams=2).validate(stream=True)


def test_defaults_go_with_every_model():
    GenerationSettings().validate(**SIZES, stream=True)


def test_a_prompt_that_leaves_no_room_is_refused():
    with pytest.raises(ArgumentError, match="shorten the prompt to 28 tokens"):
        check_prompt([5] * 40, GenerationSettings(max_new_tokens=100), **SIZES)


@pytest.mark.parametrize(
    ("content", "names", "kept"),
    [
        ('{"id": "a"}\n{"id": "b"}\n', {"a", "b"}, 24),
        ('{"id": "a"}\n{"id": "b"', {"a"}, 12),
        ('{"id": "a"}\n{"id": "c"}\n', {"a"}, 12),
        ('{"id": "c"}\n{"id": "c"}\n{"i', {"c"}, 24),
        ('{"id": "c"}\n{"id": ', set(), 0),
    ],
)
def test_what_an_interruption_left_of_answers_is_cut_off(content, names, kept, tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(content)
    assert answered(path, {"a": 1, "b": 1, "c": 2}) == names
    assert path.stat().st_size == kept
