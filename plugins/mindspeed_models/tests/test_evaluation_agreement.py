"""Answers under layouts, compared with those of lm-eval's own Hugging Face model on the same weights."""

import inspect
import json

import pytest
from benchmark_files import ALL, boolq
from corpora import write_tokenizer
from evaluation_runs import command, evaluated
from fake_model import FakeModel
from tiny_models import make, oracle

from mindspeed_models.evaluation.engine import _task, by_subject, load_questions
from mindspeed_models.evaluation.items import TaskOptions
from mindspeed_models.evaluation.tasks import TASKS
from mindspeed_testing import run_world

NEW = 8
SIZES = {"vocab_size": 400, "max_position_embeddings": 2048}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "llama"
    make("llama", root, **SIZES)
    return write_tokenizer(root)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def of_lm_eval(folder, root):
    return answers_of_lm_eval("llama", folder, root)


def answers_of_lm_eval(name, folder, root):
    """Return the answers of lm-eval's Hugging Face model to the same questions."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = HFLM(pretrained=oracle(name, **SIZES), tokenizer=tokenizer, batch_size=1, device="cpu")
    options = TaskOptions(new_tokens=NEW, run=lambda program: (False, ""))
    answers = {}
    for task, write in ALL.items():
        questions = load_questions(TASKS[task], write(root), options)
        subjects = by_subject(questions.items)
        tasks = {subject: _task(subject, questions, items, {}) for subject, items in subjects.items()}
        found = evaluate(model, tasks, bootstrap_iters=0, confirm_run_unsafe_code=True)
        answers[task] = [
            [each[0] for each in entry["resps"]]
            for subject in subjects
            for entry in sorted(found["samples"][subject], key=lambda entry: entry["doc_id"])
        ]
    return answers


def pairs_of(found, expected):
    """Yield each answer with the one that is expected."""
    assert list(found) == list(expected) == list(ALL)
    for name, answers in expected.items():
        for ours, theirs in zip(found[name], answers, strict=True):
            yield from zip(ours, theirs, strict=True)


def same(found, expected):
    for one, other in pairs_of(found, expected):
        if isinstance(other, str):
            assert one == other
        else:
            assert one[0] == pytest.approx(other[0], abs=1e-4)
            assert one[1] == other[1]


@pytest.mark.parametrize(
    ("ranks", "options"), [(1, {}), (2, {}), (2, {"tp": 2}), (2, {"pp": 2})], ids=["1", "dp2", "tp2", "pp2"]
)
def test_answers_are_those_of_lm_evals_own_model(folder, root, of_lm_eval, ranks, options):
    same(run_world(evaluated, ranks, str(folder), str(root), options, NEW)[0], of_lm_eval)


def test_experts_on_two_ranks_answer_as_lm_evals_own_model(root, tmp_path):
    make("qwen3-moe", tmp_path / "model", **SIZES)
    folder = write_tokenizer(tmp_path / "model")
    options = {"ep": 2, "flags": ("--moe-token-dispatcher-type", "alltoall")}
    found = run_world(evaluated, 2, str(folder), str(root), options, NEW)[0]
    same(found, answers_of_lm_eval("qwen3-moe", folder, root))


def test_half_precision_gives_nearly_the_same_log_likelihoods(folder, root, of_lm_eval):
    found = run_world(evaluated, 1, str(folder), str(root), {"flags": ("--bf16",)}, NEW)[0]
    scores = [(one[0], other[0]) for one, other in pairs_of(found, of_lm_eval) if not isinstance(other, str)]
    assert len(scores) > 30
    for one, other in scores:
        # Three significant digits of each logit.
        assert one == pytest.approx(other, rel=0.03, abs=0.3)
    assert any(one != other for one, other in scores)


def test_the_seeds_command_line_is_run(folder, root, tmp_path):
    """That of its README, with the sizes of this model."""
    data = boolq(root)
    line = (
        f"--task-data-path {data} --task boolq --seq-length 512 --max-new-tokens 1 "
        "--max-position-embeddings 2048 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 "
        f"--num-layers 4 --hidden-size 64 --ffn-hidden-size 96 --load {folder} --num-attention-heads 4 "
        f"--tokenizer-type PretrainedFromHF --tokenizer-name-or-path {folder} --tokenizer-not-use-fast "
        f"--fp16 --micro-batch-size 1 --seed 42 --output {tmp_path}"
    ).split()
    status, output, messages = run_world(command, 2, line, True)[0]
    assert status == 0, messages
    assert "boolq" in output
    written = json.loads((tmp_path / "results.json").read_text())["tasks"]["boolq"]
    assert written["scoring"] == "seed"
    assert written["questions"] == 3


def test_several_tasks_and_paths_follow_one_flag(folder, root):
    paths = [str(ALL[name](root)) for name in ("boolq", "gsm8k")]
    line = ["evaluate", "--load", str(folder), "--task", "boolq", "gsm8k", "--task-data-path", *paths]
    status, output, messages = run_world(command, 1, [*line, "--max-new-tokens", "3", "--quiet"])[0]
    assert status == 0, messages
    assert "exact_match" in output
    assert "acc_capitalized" in output


def test_the_fake_of_other_tests_has_the_methods_of_the_model():
    from mindspeed_models.inference.loaded import LoadedModel

    for name in ("generate_requests", "score", "close"):
        ours, theirs = (
            list(inspect.signature(getattr(kind, name)).parameters) for kind in (FakeModel, LoadedModel)
        )
        assert ours == theirs
