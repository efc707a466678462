"""``mindspeed-models run tiny-FAMILY generate`` and ``evaluate``: the model answers on two processes."""

import json

import pytest
from benchmark_files import boolq
from chains import run_chain
from corpora import write_lines
from generation_runs import generations

from mindspeed_models.program import main
from mindspeed_testing.worlds import run_world

PROMPTS = ["the cat saw", "a dog and it ran"]
BEFORE = ("convert", "preprocess", "pretrain", "finetune")
FAMILIES = ("aquila", "baichuan", "baichuan2", "bloom", "internlm", "llama", "llama2")


def ask(family, folder, step, nproc="2"):
    words = ("--work-dir", str(folder), "--platform", "cpu", "--nproc", nproc)
    sources = ("--prompts", str(folder / "prompts.jsonl"), "--task", f"boolq={folder / 'boolq' / 'test'}")
    return main(["run", f"tiny-{family}", step, *words, *sources])


@pytest.fixture(scope="module", params=FAMILIES)
def asked(request, tmp_path_factory):
    """A family, its folder, and the statuses of both steps."""
    family = request.param
    folder = run_chain(tmp_path_factory.mktemp(family), f"tiny-{family}", BEFORE)
    write_lines(folder / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    boolq(folder)
    return family, folder, [ask(family, folder, step) for step in ("generate", "evaluate")]


def test_two_processes_continue_prompts_as_one_does(asked):
    _, folder, statuses = asked
    assert statuses == [0, 0]
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [each["id"] for each in answers] == ["0", "1"]
    tokenizer = str(folder / "tokenizer" / "text.tokenizer.json")
    flags = ["--model-config", str(folder / "model"), "--tokenizer-model", tokenizer]
    calls = [("ids", (PROMPTS,), {"max_new_tokens": 16})]
    ((found,),) = run_world(generations, 1, str(folder / "finetuned"), [{"flags": flags}], calls, timeout=200)
    assert [each["tokens"] for each in answers] == found[0]


def test_an_evaluation_has_an_answer_to_every_question(asked):
    _, folder, _ = asked
    found = json.loads((folder / "evaluated" / "results.json").read_text())["tasks"]["boolq"]
    assert found["questions"] == 3


def test_answers_are_not_written_over(asked, capfd):
    family, folder, _ = asked
    assert ask(family, folder, "generate", nproc="1") == 1
    assert "add --resume, or name another" in capfd.readouterr().err
