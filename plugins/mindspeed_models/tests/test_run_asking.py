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


@pytest.fixture(scope="module", params=FAMILIES)
def work(request, tmp_path_factory):
    folder = run_chain(tmp_path_factory.mktemp(request.param), f"tiny-{request.param}", BEFORE)
    write_lines(folder / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    shared = (f"tiny-{request.param}", "--work-dir", str(folder), "--platform", "cpu", "--nproc", "2")
    sources = ("--prompts", str(folder / "prompts.jsonl"), "--task", f"boolq={boolq(folder)}")
    for step in ("generate", "evaluate"):
        assert main(["run", shared[0], step, *shared[1:], *sources]) == 0, step
    return folder


def test_two_processes_continue_prompts_as_one_does(work):
    answers = [json.loads(line) for line in (work / "answers.jsonl").read_text().splitlines()]
    assert [each["id"] for each in answers] == ["0", "1"]
    tokenizer = str(work / "tokenizer" / "text.tokenizer.json")
    flags = ["--model-config", str(work / "model"), "--tokenizer-model", tokenizer]
    calls = [("ids", (PROMPTS,), {"max_new_tokens": 16})]
    ((found,),) = run_world(generations, 1, str(work / "finetuned"), [{"flags": flags}], calls, timeout=200)
    assert [each["tokens"] for each in answers] == found[0]


def test_an_evaluation_has_an_answer_to_every_question(work):
    results = json.loads((work / "evaluated" / "results.json").read_text())
    assert len((work / "evaluated" / "answers.jsonl").read_text().splitlines()) >= 3
    assert "boolq" in json.dumps(results)


def test_answers_are_not_written_over(work, capfd):
    name = json.loads((work / "model" / "config.json").read_text())["model_type"]
    words = ("--work-dir", str(work), "--platform", "cpu", "--nproc", "1")
    family = next(each for each in FAMILIES if each in str(work.name) or each == name)
    assert main(["run", f"tiny-{family}", "generate", *words, "--prompts", str(work / "prompts.jsonl")]) == 1
    assert "add --resume, or name another" in capfd.readouterr().err
