"""An evaluation with a model without weights: means, errors, interruption, exit status."""

import json
import math
import socket
import sys
from dataclasses import replace

import pytest
from benchmark_files import ALL
from fake_model import FakeModel

from mindspeed_core.errors import UserError
from mindspeed_models.evaluation.answers import AnswerLog
from mindspeed_models.evaluation.command import Evaluation, main_of_seed, questions_of, report, spread
from mindspeed_models.evaluation.engine import evaluate, load_questions
from mindspeed_models.evaluation.items import TaskOptions
from mindspeed_models.evaluation.results import as_json, table
from mindspeed_models.evaluation.tasks import TASKS
from mindspeed_models.program import main
from mindspeed_models.serving.model_options import ModelOptions
from mindspeed_models.serving.prompts import load_prompts


@pytest.fixture(scope="module", autouse=True)
def no_network():
    """Nothing in this module may open a socket to another machine."""

    def refuse(self, address):
        raise AssertionError(f"a connection to {address}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        yield


@pytest.fixture
def model(tmp_path):
    return FakeModel(tmp_path / "model", lambda prompt: " The answer is 1234. A", max_positions=2048)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def questions(root, *tasks, **options):
    run = {"run": lambda program: ("return" in program, "")}
    return [load_questions(TASKS[task], ALL[task](root), TaskOptions(**{**run, **options})) for task in tasks]


def evaluated(model, asked, log=None, **more):
    with log or AnswerLog(None, "") as answers:
        return evaluate(model, load_prompts(model, model.folder, None), asked, answers, **more)


def test_all_seven_tasks_give_means_with_errors(model, root):
    results = evaluated(model, questions(root, *ALL))
    assert [result.questions.task.name for result in results] == list(ALL)
    for result in results:
        assert result.errors == 0
        assert result.truncated == 0
        assert len(result.samples) == len(result.questions.items)
    found = as_json(results)["tasks"]
    assert found["gsm8k"]["means"]["exact_match"]["micro"]["value"] == 0.5
    # Of 1 and 0: 0.7071 / sqrt(2).
    assert found["gsm8k"]["means"]["exact_match"]["micro"]["stderr"] == pytest.approx(0.5)
    assert set(found["mmlu"]["means"]["acc"]) == {"other", "humanities", "macro", "micro"}
    assert "± stderr" in table(results)


def test_choices_are_judged_by_the_scores_of_the_model(model, root):
    (result,) = evaluated(model, questions(root, "boolq"))
    prompts = load_prompts(model, model.folder, None)
    for sample in result.samples:
        context = prompts.text(sample.item.context)
        scores = [
            model.score([(context, prompts.text(sample.item.context + choice)[len(context) :])])[0].logprob
            for choice in sample.item.choices
        ]
        assert [value for value, _ in sample.answers] == pytest.approx(scores)
        assert sample.scores["acc"] == float((scores[0] > scores[1]) == (sample.item.target == "yes"))


def test_the_seeds_boolq_compares_last_tokens(model, root):
    (result,) = evaluated(model, questions(root, "boolq", scoring="seed"))
    prompts = load_prompts(model, model.folder, None)
    sample = result.samples[0]
    scores = [
        model.score([(prompts.text(sample.item.context), prompts.text(word)[-1:])])[0].logprob
        for word in ("Yes", "No")
    ]
    assert [value for value, _ in sample.answers] == pytest.approx(scores)


def test_prompts_reach_the_model_as_they_were_written(model, root):
    (asked,) = questions(root, "gsm8k")
    evaluated(model, [asked])
    seen = {model.tokenizer.detokenize(request.prompt) for request in model.asked}
    assert seen == {item.context for item in asked.items}
    assert {request.settings.stop for request in model.asked} == {("Question:", "\n\nQ:")}
    assert not any(request.settings.do_sample for request in model.asked)


def test_several_answers_are_drawn_apart_for_pass_at_k(model, root):
    (asked,) = questions(root, "human_eval", samples=12)
    (result,) = evaluated(model, [asked], temperature=0.8, seed=5)
    assert set(result.subjects[0].means) == {"pass@1", "pass@10"}
    assert len(model.asked) == 24
    assert len({(request.request_id, tuple(request.prompt)) for request in model.asked}) == 24
    assert {request.settings.seed for request in model.asked} == {5}


def test_an_interrupted_evaluation_goes_on(model, root, tmp_path):
    asked = questions(root, "mmlu", "gsm8k")
    whole = evaluated(model, asked)
    calls = len(model.scored), len(model.asked)
    file = tmp_path / "answers.jsonl"
    failing = FakeModel(tmp_path / "again", model.say, max_positions=2048)
    failing.failure = lambda requests: KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        evaluated(failing, asked, AnswerLog(file, "m"), batch_tokens=300)
    assert len(failing.scored) == calls[0]
    # What a killed process leaves at the end of the file.
    with file.open("a") as torn:
        torn.write('{"asked": "ab')
    failing.failure = lambda requests: None
    log = AnswerLog(file, "m")
    assert log.resumed == calls[0]
    again = evaluated(failing, asked, log)
    assert (len(failing.scored), len(failing.asked)) == (calls[0], calls[1] + 1)
    assert as_json(again) == as_json(whole)
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_answers_of_another_model_are_refused(tmp_path):
    file = tmp_path / "answers.jsonl"
    AnswerLog(file, "one").close()
    with pytest.raises(UserError, match="answers of another model"):
        AnswerLog(file, "two")
    file.write_text("{}\n")
    with pytest.raises(UserError, match="line 1 is damaged"):
        AnswerLog(file, "one")


def test_a_question_without_an_answer_is_an_error_and_not_only_wrong(model, root):
    def failure(requests):
        bad = [each for each in requests if "days" in model.tokenizer.detokenize(each.prompt)]
        return UserError("the cache is full") if bad else None

    model.failure = failure
    (result,) = evaluated(model, questions(root, "gsm8k"))
    assert result.errors == 1
    assert [sample.error for sample in result.samples] == ["the cache is full", None]


def test_scores_that_are_no_numbers_are_errors(model, root):
    score = model.score
    model.score = lambda pairs: [replace(each, logprob=math.nan) for each in score(pairs)]
    (result,) = evaluated(model, questions(root, "boolq"))
    assert result.errors == 3
    assert {sample.scores["acc"] for sample in result.samples} == {0.0}


def test_long_prompts_lose_their_beginning_and_are_counted(root, tmp_path):
    small = FakeModel(tmp_path / "m", max_positions=64, bos=True)
    (result,) = evaluated(small, questions(root, "mmlu"))
    assert result.truncated == len(result.samples) > 0
    begin = small.tokenizer.library.token_to_id("<s>")
    for context, continuation in small.scored:
        assert len(context) + len(continuation) == 65
        assert context[0] == begin
        assert small.tokenizer.detokenize(context).endswith("Answer:")


def test_letters_are_written_where_answers_are_not_public(model, root, tmp_path):
    evaluation = Evaluation(
        ("ceval",), (f"ceval={ALL['ceval'](root)}",), TaskOptions(split="test"), tmp_path / "out", quiet=True
    )
    options = options_of(model)
    assert report(model, options, evaluation, questions_of(evaluation)) == 0
    written = json.loads((tmp_path / "out" / "submission.json").read_text())
    assert set(written) == {"logic"}
    assert set(written["logic"]) == {"0", "1", "2", "3"}
    assert set(written["logic"].values()) <= set("ABCD")
    assert json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["ceval"]["means"] == {}


class Options(ModelOptions):
    """Options of a fake model."""

    def prompts(self, model):
        return load_prompts(model, model.folder, None)


def options_of(model):
    return Options(str(model.folder))


def test_a_report_is_written_and_its_status_says_of_errors(model, root, tmp_path, capsys):
    out = tmp_path / "out"
    evaluation = Evaluation(
        ("gsm8k", "boolq"), (f"gsm8k={ALL['gsm8k'](root)}", str(ALL["boolq"](root))), TaskOptions(), out
    )
    options = options_of(model)
    assert report(model, options, evaluation, questions_of(evaluation)) == 0
    printed = capsys.readouterr()
    assert "gsm8k  micro  exact_match" in printed.out
    assert "log-likelihoods: 12 of 12" in printed.err
    lines = (out / "samples_gsm8k.jsonl").read_text().splitlines()
    logged = json.loads(lines[0])
    assert logged["target"] == "1,234"
    assert logged["answers"] == [" The answer is 1234. A"]
    found = json.loads((out / "results.json").read_text())
    assert len(found["tasks"]["gsm8k"]["prompt_hash"]) == 16
    assert found["tasks"]["gsm8k"]["shots"] == [3]
    (out / "answers.jsonl").unlink()
    model.failure = lambda requests: UserError("no room")
    assert report(model, options, evaluation, questions_of(evaluation)) == 1
    said = "2 questions got no answer and count as wrong, the first test/0: no room"
    assert said in capsys.readouterr().err


def test_words_behind_a_flag_are_all_its_own():
    line = "--bf16 --task mmlu gsm8k --task-data-path a/mmlu gsm8k=b --seq-length 8 --task=boolq c".split()
    assert (
        spread(line)
        == (
            "--bf16 --task mmlu --task gsm8k --task-data-path a/mmlu --task-data-path gsm8k=b --seq-length 8 "
            "--task=boolq --task c"
        ).split()
    )


def test_a_missing_engine_is_said_before_a_model_is_loaded(root, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    line = ["evaluate", "--load", "nothing", "--task", "boolq", "--task-data-path", str(ALL["boolq"](root))]
    assert main(line) == 1
    assert "pip install 'mindspeed-models[eval]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--task: no task is named"),
        (["--task", "mmlu", "gsm8"], "did you mean 'gsm8k'"),
        (["--task", "mmlu"], "no path is mmlu's"),
        (["--task", "mmlu", "--task-data-path", "/nothing/mmlu"], "does not exist"),
        (["--task", "boolq", "--task-data-path", "x", "--split", "public"], "--split 'public'"),
        (["--task", "human_eval", "--task-data-path", "x"], "--allow-code-execution"),
    ],
)
def test_a_wrong_line_is_one_sentence(words, sentence, capsys):
    assert main(["evaluate", "--load", "nothing", *words]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


SEED_LINE = """--task-data-path dataset/boolq/test --task boolq --seq-length 512 --max-new-tokens 1
--max-position-embeddings 512 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-layers 32
--hidden-size 4096 --ffn-hidden-size 11008 --load ../models/llama-7b-tp2-pp4/ --num-attention-heads 32
--tokenizer-type PretrainedFromHF --tokenizer-name-or-path ../models/llama7b-hf/ --tokenizer-not-use-fast
--fp16 --micro-batch-size 1 --seed 42"""


def test_every_flag_of_the_seeds_line_is_read_or_passed_on(monkeypatch):
    seen = []

    def note(options, evaluation):
        seen.append((options, evaluation))
        return 0

    monkeypatch.setattr("mindspeed_models.evaluation.command.run_evaluation", note)
    # What torch.distributed.launch adds, in a process that it started.
    monkeypatch.setenv("RANK", "3")
    assert main_of_seed(["--local-rank=3", *SEED_LINE.split()]) == 0
    ((options, evaluation),) = seen
    assert (options.load, options.tp, options.pp) == ("../models/llama-7b-tp2-pp4/", 2, 4)
    assert (evaluation.tasks, evaluation.paths) == (("boolq",), ("dataset/boolq/test",))
    assert (evaluation.options.scoring, evaluation.options.new_tokens, evaluation.seed) == ("seed", 1, 42)
    passed_on = (
        "--seq-length 512 --max-position-embeddings 512 --num-layers 32 --hidden-size 4096 --ffn-hidden-size "
        "11008 --num-attention-heads 32 --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "
        "../models/llama7b-hf/ --tokenizer-not-use-fast --fp16 --micro-batch-size 1"
    )
    assert list(options.flags) == passed_on.split()
