"""Generation in one process: transformers' tokens, texts while they grow, and requests in one batch."""

import pytest
import torch
from generation_runs import generations
from tiny_models import make, oracle

from mindspeed_testing import run_world

NEW = 24
PROMPTS = [[5, 9, 33, 71, 12], [8, 100, 201, 77, 3, 60, 61, 62, 140, 150, 9], [44, 45] * 10]
LONG = PROMPTS[1]
SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 3}
PENALTY = {"repetition_penalty": 1.3, "min_new_tokens": 4}
BEAMS = {"num_beams": 4, "max_new_tokens": 12}
ENDING = {"num_beams": 3, "max_new_tokens": 20, "length_penalty": 0.6, "num_return_sequences": 3}
CALLS = {
    "alone": ("ids", (LONG,), {"max_new_tokens": NEW}),
    "ragged": ("ids", (PROMPTS,), {"max_new_tokens": NEW}),
    "penalty": ("ids", (LONG,), {"max_new_tokens": NEW, **PENALTY}),
    "beams": ("ids", (LONG,), BEAMS),
    "beams that end": ("ids", (LONG,), {**ENDING, "eos_token_id": list(range(20))}),
    "sampled": ("ids", (PROMPTS,), {"max_new_tokens": NEW, **SAMPLING}),
    "sampled alone": ("ids", (PROMPTS[0],), {"max_new_tokens": NEW, **SAMPLING}),
    "other seed": ("ids", (PROMPTS[0],), {"max_new_tokens": NEW, **SAMPLING, "seed": 4}),
    "all drawn": (
        "ids",
        (LONG,),
        {"max_new_tokens": 60, "do_sample": True, "top_k": 0, "temperature": 9.0, "eos_token_id": []},
    ),
    "sampled beams": ("ids", (LONG,), {**BEAMS, **SAMPLING}),
    "log-probabilities": (
        "generate",
        (LONG,),
        {"max_new_tokens": 5, "return_output_log_probs": True, "detokenize": False},
    ),
    "likeliest": ("generate", (LONG,), {"max_new_tokens": 3, "logprobs": 2, "detokenize": False}),
    "scores": ("scored", ([(LONG[:4], LONG[4:]), (PROMPTS[0], [1]), (PROMPTS[2][:9], PROMPTS[2][9:])],), {}),
    "total length": ("ids", (LONG,), {"max_length": 16}),
    "with input": ("ids", (torch.tensor([LONG]),), {"max_new_tokens": 2, "include_input": True}),
    "cancelled": ("cancelled", (PROMPTS[:2], 3), {"max_new_tokens": 8}),
    "cache": ("cached", (PROMPTS, 40), {}),
    "no memory": ("without memory", (LONG,), {}),
    "empty": ("ids", ([],), {}),
    "too long": ("ids", (LONG,), {"max_new_tokens": 125}),
    "no such id": ("ids", ([9, 251],), {"max_new_tokens": 2}),
    "no room": ("ids", (LONG,), {"max_length": 11}),
    "adapter": ("generate", (LONG,), {"adapter": "poet"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "llama"
    make("llama", root)
    return root


@pytest.fixture(scope="module")
def found(folder):
    """Results of one model, and the same with its prompts computed in chunks of 4 tokens."""
    options = [{"batch_size": 8}, {"prefill_chunk": 4}]
    ((plain, chunks),) = run_world(generations, 1, str(folder), options, list(CALLS.values()))
    return dict(zip(CALLS, plain)), dict(zip(CALLS, chunks))


@pytest.fixture(scope="module")
def model():
    return oracle("llama")


def of_transformers(model, prompt, **settings):
    """Return the new tokens of transformers' generate, without the end token."""
    ids = torch.tensor([prompt])
    ends = settings.pop("eos_token_id", 2)
    with torch.no_grad():
        rows = model.generate(
            ids, attention_mask=torch.ones_like(ids), eos_token_id=ends, pad_token_id=0, **settings
        )
    stops = [ends] if isinstance(ends, int) else ends
    answers = []
    for row in rows[:, len(prompt) :].tolist():
        end = next((at for at, token in enumerate(row) if token in stops), len(row))
        answers.append(row[:end])
    return answers if len(answers) > 1 else answers[0]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("alone", {"max_new_tokens": NEW}),
        ("penalty", {"max_new_tokens": NEW, **PENALTY}),
        ("beams", BEAMS),
        ("beams that end", {**ENDING, "eos_token_id": list(range(20))}),
    ],
)
def test_tokens_are_those_of_transformers(found, model, name, settings):
    assert found[0][name] == of_transformers(model, LONG, do_sample=False, **settings)


def test_a_text_in_a_ragged_batch_is_continued_as_it_is_alone(found, model):
    assert found[0]["ragged"] == [
        of_transformers(model, prompt, max_new_tokens=NEW, do_sample=False) for prompt in PROMPTS
    ]


def test_prompts_in_chunks_give_the_same(found):
    drawn = {"ragged", "beams", "sampled", "penalty", "cancelled"}
    assert {name: found[1][name] for name in drawn} == {name: found[0][name] for name in drawn}


def test_drawn_tokens_depend_on_the_seed_and_on_nothing_else_in_the_batch(found):
    results = found[0]
    assert results["sampled"][0] == results["sampled alone"]
    assert results["sampled alone"] != results["other seed"]
    assert results["sampled alone"] != results["ragged"][0]


def test_padded_ids_of_the_vocabulary_are_never_drawn(found):
    # 250 tokens in 256 rows; at this temperature all are nearly as likely.
    assert max(found[0]["all drawn"]) < 250
    assert len(set(found[0]["all drawn"])) > 30


def test_beams_that_sample_return_an_answer_of_the_length_asked_for(found):
    assert len(found[0]["sampled beams"]) == 12


def test_log_probabilities_are_those_of_the_model(found, model):
    tokens, logprobs = found[0]["log-probabilities"]
    with torch.no_grad():
        logits = model(torch.tensor([[*LONG, *tokens]])).logits[0].log_softmax(-1)
    expected = [float(logits[len(LONG) - 1 + at, token]) for at, token in enumerate(tokens)]
    assert logprobs == pytest.approx(expected, abs=1e-4)
    likeliest = found[0]["likeliest"][1]
    values, places = logits[len(LONG) - 1].topk(2)
    assert list(likeliest[0]) == places.tolist()
    assert list(likeliest[0].values()) == pytest.approx(values.tolist(), abs=1e-4)


def test_scores_are_log_likelihoods_of_the_continuation(found, model):
    for (context, continuation), score in zip(CALLS["scores"][1][0], found[0]["scores"]):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation]])).logits[0].log_softmax(-1)
        rows = logits[len(context) - 1 : -1]
        expected = [float(row[token]) for row, token in zip(rows, continuation)]
        assert score["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert score["logprob"] == pytest.approx(sum(expected), abs=1e-3)
        assert score["greedy"] == (rows.argmax(-1).tolist() == continuation)


def test_the_length_of_prompt_and_answer_is_limited_together(found):
    assert found[0]["total length"] == found[0]["alone"][:5]
    assert found[0]["with input"] == [[*LONG, *found[0]["alone"][:2]]]


def test_the_cache_takes_the_bytes_of_the_formula(found):
    # 2 tensors, 4 layers, 3 texts, 40 tokens, 2 groups of 16 float32.
    assert found[0]["cache"] == (2 * 4 * 3 * 40 * 2 * 16 * 4,) * 2


def test_a_request_is_cancelled_and_the_others_go_on(found):
    first, second = found[0]["cancelled"]
    assert first == found[0]["ragged"][0][:3]
    assert second == found[0]["ragged"][1][:8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no memory", "the keys and values of 1 texts of 75 tokens take 0.00 GiB, and 0.00 GiB are free"),
        ("empty", "a prompt is text, ids or messages"),
        ("too long", "--max-new-tokens 125: a prompt of 11 tokens and 125 new ones exceed the model's 128"),
        ("no such id", "--prompt 251: is no token of the model, which has 250"),
        ("no room", "--max-length 11: the prompt alone has 11 tokens"),
        ("adapter", "adapter 'poet': none is loaded"),
    ],
)
def test_what_cannot_be_computed_is_one_sentence(found, name, words):
    assert words in found[0][name]
