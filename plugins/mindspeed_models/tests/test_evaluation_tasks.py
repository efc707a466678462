"""Seven benchmarks: what is read from their files, what is asked, and how answers are judged."""

import dataclasses
import json

import pytest
from benchmark_files import ALL, CHOICES, rows

from mindspeed_core.errors import ArgumentError, DataError, UserError
from mindspeed_models.evaluation.engine import load_questions
from mindspeed_models.evaluation.items import TaskOptions
from mindspeed_models.evaluation.tasks import TASKS, data_paths, task_named
from mindspeed_models.evaluation.tasks.human_eval import pass_at
from mindspeed_models.evaluation.tasks.letters import seed_letter

RUN = TaskOptions(run=lambda program: (True, ""))
SEED = TaskOptions(scoring="seed", run=lambda program: (True, ""))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for write in ALL.values():
        write(folder)
    return folder


def asked(root, name, options=RUN):
    return load_questions(TASKS[name], ALL[name](root), options).items


def judged(root, name, answers, options=RUN, at=0):
    item = asked(root, name, options)[at]
    return dict(TASKS[name].score(item, answers, options))


def test_boolq_asks_for_yes_or_no(root):
    items = asked(root, "boolq")
    assert items[0].context == (
        "The cat saw a dog and it ran to its house.\nQuestion: did the cat see a dog?\nAnswer:"
    )
    assert [item.target for item in items] == ["yes", "no", "yes"]
    assert judged(root, "boolq", [-1.0, -2.0, -4.0, -3.0]) == {"acc": 1.0, "acc_capitalized": 0.0}
    assert judged(root, "boolq", [-2.0, -1.0], SEED) == {"acc": 0.0}
    assert asked(root, "boolq", SEED)[0].last_token


def test_mmlu_shows_five_examples_of_the_subject(root):
    items = asked(root, "mmlu")
    first = items[0]
    assert first.context.startswith(
        "The following are multiple choice questions (with answers) about anatomy.\n\n"
    )
    assert first.context.count("Answer:") == 6
    assert first.shots == 5
    assert first.context.endswith("Which animal runs\nA. cat\nB. house\nC. day\nD. before\nAnswer:")
    assert first.choices == (" A", " B", " C", " D")
    assert first.gold == 0
    assert judged(root, "mmlu", [-1.0, -2.0, -3.0, -4.0]) == {"acc": 1.0}
    # Equal likelihoods: the first.
    assert judged(root, "mmlu", [-1.0, -1.0, -1.0, -1.0]) == {"acc": 1.0}


def test_mmlu_without_examples_says_so(root):
    said = []
    items = asked(root, "mmlu", TaskOptions(warn=said.append))
    religions = [item for item in items if item.subject == "world_religions"]
    assert religions[0].shots == 0
    assert "Answer: " not in religions[0].context
    assert said == ["mmlu world_religions: there is no dev/world_religions_dev.csv, so no examples are shown"]
    assert asked(root, "mmlu", TaskOptions(shots=0))[0].shots == 0


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (" B. house", "B"),
        ("The answer is C.\nA. no", "C"),
        ("B", ""),
        ("| x.", ""),
        ("|. A.", "|"),
        ("none\nA. cat", "A"),
        ("E. dog", ""),
        ("", ""),
    ],
)
def test_the_seed_reads_a_letter_before_a_full_stop(text, letter):
    assert seed_letter(text) == letter


def test_mmlu_by_the_seeds_rules_generates(root):
    item = asked(root, "mmlu", SEED)[0]
    assert item.choices == ()
    assert item.new_tokens == 4
    assert judged(root, "mmlu", [" A. cat"], SEED) == {"acc": 1.0}
    assert judged(root, "mmlu", ["A"], SEED) == {"acc": 0.0}


def test_gsm8k_shows_solutions_of_the_training_data(root):
    first, second = asked(root, "gsm8k")
    assert first.shots == 3
    assert first.target == "1,234"
    assert second.target == "-7"
    assert first.context.startswith(
        "Question: It saw 0 dogs. How many?\nAnswer: It saw 2 and 3 dogs: 2+3=5.\nThe answer is 5.\n\n"
    )
    assert first.context.endswith("Question: How many days?\nAnswer:")


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (" So it is. The answer is 1234.", 1, 1),
        (" #### 1,234", 1, 1),
        (" The answer is $1,234.00 dollars", 1, 1),
        (" It is 1234", 0, 1),
        (" The answer is 7. No, 1234", 0, 1),
        (" The answer is 1234, or 7", 1, 0),
        (" nobody knows", 0, 0),
        ("", 0, 0),
    ],
)
def test_gsm8k_compares_numbers(root, text, strict, flexible):
    assert judged(root, "gsm8k", [text]) == {"exact_match": strict, "flexible": flexible}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The answer is 1,234 days", 1),
        ("The answer is 1,234.", 0),
        ("The answer is 1234 days", 0),
        ("Q: x The answer is 1,234 days", 0),
        ("The answer is 1,234 days. The answer is 3 cats", 0),
    ],
)
def test_gsm8k_by_the_seeds_rules(root, text, right):
    assert judged(root, "gsm8k", [text], SEED) == {"exact_match": right}


def test_human_eval_runs_prompt_answer_and_tests(root):
    programs = []

    def run(program):
        programs.append(program)
        return "a + 0" in program, ""

    options = TaskOptions(run=run, samples=2)
    scores = judged(root, "human_eval", ["    return a + 0\n", "    return 5\n"], options)
    assert scores == {"pass@1": 0.5}
    scope = {}
    exec(programs[0], scope)
    assert programs[0].endswith("check(f0)\n")


def test_human_eval_runs_nothing_unless_allowed(root):
    with pytest.raises(UserError, match="--allow-code-execution"):
        asked(root, "human_eval", TaskOptions())


def test_pass_at_k_is_unbiased():
    assert pass_at(10, 3, 1) == pytest.approx(0.3)
    # One of two drawn without putting back.
    assert pass_at(4, 2, 2) == pytest.approx(1 - (2 / 4) * (1 / 3))
    assert pass_at(5, 5, 3) == 1
    assert pass_at(5, 0, 3) == 0


def test_agieval_compares_letters_sets_and_texts(root):
    items = {item.key: item for item in asked(root, "agieval")}
    english = items["sat-en/0"]
    assert english.context == (
        "It ran. Q: Who ran? Answer Choices: (A)a cat (B)a dog (C)a house (D)a day\n"
        "A: Among A through D, the answer is"
    )
    assert english.choices == (" A", " B", " C", " D")
    assert english.gold == 1
    chinese = items["gaokao-history/0"]
    assert chinese.context.endswith("答案：从A到D，我们应选择")
    assert chinese.choices[0] == "A"
    several = items["jec-qa-kd/0"]
    assert several.choices == ()
    assert items["jec-qa-kd/1"].choices == ()
    score = TASKS["agieval"].score
    assert score(several, ["A和C"], RUN) == {"acc": 1.0}
    assert score(several, ["AC"], RUN) == {"acc": 1.0}
    assert score(several, ["A"], RUN) == {"acc": 0.0}
    free = items["math/0"]
    assert score(free, [" ( 2 ).\nmore"], RUN) == {"acc": 1.0}
    assert score(free, ["3"], RUN) == {"acc": 0.0}
    assert score(free, ["2"], SEED) == {"acc": 0.0}
    assert score(free, ["$2$\nx"], SEED) == {"acc": 1.0}


def test_agieval_shows_examples_on_demand(root):
    items = {item.key: item for item in asked(root, "agieval", TaskOptions(shots=1))}
    assert items["sat-en/0"].context.count("the answer is B\n\n") == 1
    assert items["sat-en/0"].shots == 1
    assert items["math/0"].shots == 0


def test_bbh_asks_directly_or_for_reasoning(root):
    direct = asked(root, "bbh")[0]
    assert direct.context == (
        "Q: not True\nA: False\n\nQ: not False\nA: True\n\nQ: not True\nA: False\n\nQ: not ( True )\nA:"
    )
    assert judged(root, "bbh", [" False\nmore"]) == {"exact_match": 1.0}
    assert judged(root, "bbh", [" False."]) == {"exact_match": 0.0}
    reasoning = dataclasses.replace(RUN, reasoning=True)
    item = asked(root, "bbh", reasoning)[0]
    assert item.context.endswith("Q: not ( True )\nA: Let's think step by step.")
    assert "We negate it.\nSo the answer is False." in item.context
    assert judged(root, "bbh", [" Hm.\nSo the answer is False."], reasoning) == {"exact_match": 1.0}
    assert judged(root, "bbh", [" False"], reasoning) == {"exact_match": 0.0}


def test_ceval_asks_in_chinese(root):
    items = asked(root, "ceval")
    assert len(items) == 3
    assert items[0].shots == 5
    assert items[0].context.endswith("问：谁看见了一只狗\nA. 猫\nB. 房子\nC. 天\nD. 没有人\n答：")
    assert items[0].context.count("答：A\n\n") == 5
    assert judged(root, "ceval", [-1.0, -2.0, -3.0, -4.0]) == {"acc": 1.0}
    assert judged(root, "ceval", ["A"], SEED) == {"acc": 1.0}
    assert judged(root, "ceval", [" A"], SEED) == {"acc": 0.0}


def test_ceval_does_not_know_the_answers_of_its_test_split(root):
    items = asked(root, "ceval", TaskOptions(split="test"))
    assert len(items) == 4
    assert {item.gold for item in items} == {None}


def test_a_limit_counts_for_each_subject(root):
    items = asked(root, "mmlu", TaskOptions(limit=1))
    assert [item.key for item in items] == ["anatomy/0", "world_religions/0"]


DAMAGES = [
    ("boolq", "boolq/test/dev.jsonl", lambda text: text + "{", "line 4: is no JSON"),
    (
        "boolq",
        "boolq/test/dev.jsonl",
        lambda text: text.replace("passage", "text"),
        "line 1: has no field 'passage'",
    ),
    ("boolq", "boolq/test/dev.jsonl", lambda text: text.replace("true", '"yes"'), "line 1: 'answer' is str"),
    ("boolq", "boolq/test/dev.jsonl", lambda text: "[1]\n" + text, "line 1: is a JSON list"),
    ("boolq", "boolq/test/dev.jsonl", lambda text: "\n", "holds no question of boolq"),
    ("mmlu", "mmlu/test/anatomy_test.csv", lambda text: text + "a,b\n", "has 2 columns instead of 6"),
    ("mmlu", "mmlu/test/anatomy_test.csv", lambda text: text.replace(",D", ",E"), "the answer is 'E'"),
    ("mmlu", "mmlu/test/anatomy_test.csv", lambda text: text + 'a,"b', "copy the file again"),
    (
        "gsm8k",
        "gsm8k/test.jsonl",
        lambda text: text.replace("1,234", "many"),
        "line 1: the answer ends in 'many'",
    ),
    (
        "human_eval",
        "human_eval/human_eval.jsonl",
        lambda text: text.replace("entry_point", "x"),
        "'entry_point'",
    ),
    ("agieval", "agieval/sat-en.jsonl", lambda text: text.replace('"B"', '"Z"'), "line 1: the label is 'Z'"),
    ("bbh", "bbh/boolean_expressions.json", lambda text: text[:-3], "is no JSON"),
    ("bbh", "bbh/boolean_expressions.json", lambda text: '{"data": []}', "has no field 'examples'"),
    ("bbh", "bbh/cot-prompts/boolean_expressions.txt", lambda text: "Q: a\nB", "example 1 has no answer"),
    (
        "ceval",
        "ceval/val/logic_val.csv",
        lambda text: text.replace("question", "text"),
        "no column 'question'",
    ),
    (
        "ceval",
        "ceval/val/logic_val.csv",
        lambda text: text + "4,x\n",
        "line 5: has other columns",
    ),
]


@pytest.mark.parametrize(("task", "path", "change", "sentence"), DAMAGES)
def test_a_damaged_file_is_named_with_its_line(tmp_path, task, path, change, sentence):
    folder = ALL[task](tmp_path)
    file = tmp_path / path
    file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(DataError) as found:
        load_questions(TASKS[task], folder, RUN)
    assert sentence in str(found.value)
    assert str(file if "holds no" not in sentence else folder) in str(found.value)


@pytest.mark.parametrize("task", list(ALL))
def test_missing_files_are_said(tmp_path, task):
    with pytest.raises(DataError, match="does not exist"):
        load_questions(TASKS[task], tmp_path / "nothing", RUN)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no"):
        load_questions(TASKS[task], tmp_path / "empty", RUN)


def test_a_file_of_no_subject_is_refused(tmp_path):
    folder = ALL["agieval"](tmp_path)
    (folder / "sat-english.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="'sat-english' is no subject of agieval"):
        load_questions(TASKS["agieval"], folder, RUN)


def test_training_data_are_not_evaluated_by_accident(tmp_path):
    folder = ALL["gsm8k"](tmp_path)
    (folder / "test.jsonl").unlink()
    with pytest.raises(DataError, match="training data alone"):
        load_questions(TASKS["gsm8k"], folder, RUN)
    assert len(load_questions(TASKS["gsm8k"], folder, TaskOptions(split="train")).items) == 5


def test_an_unknown_task_names_the_nearest():
    with pytest.raises(ArgumentError, match="did you mean 'boolq'"):
        task_named("boolQ")


@pytest.mark.parametrize(
    ("tasks", "given", "expected"),
    [
        (["boolq"], ["dataset/boolq/test"], {"boolq": "dataset/boolq/test"}),
        (["boolq"], ["data"], {"boolq": "data"}),
        (["mmlu", "gsm8k"], ["x/MMLU/test", "gsm8k=y"], {"mmlu": "x/MMLU/test", "gsm8k": "y"}),
        (["mmlu", "gsm8k"], ["x/mmlu"], "no path is gsm8k's"),
        (["mmlu"], ["a/mmlu", "b/mmlu"], "2 paths could be mmlu's"),
        (["mmlu"], ["boolq=x"], "boolq is not evaluated"),
        (["mmlu"], [], "no path is mmlu's"),
    ],
)
def test_paths_belong_to_tasks(tasks, given, expected):
    if isinstance(expected, str):
        with pytest.raises(ArgumentError, match=expected):
            data_paths(tasks, given)
    else:
        assert {name: str(path) for name, path in data_paths(tasks, given).items()} == expected


def test_all_57_subjects_of_mmlu_have_a_group():
    assert sum(map(len, TASKS["mmlu"].groups.values())) == 57


def test_separators_of_unicode_do_not_end_a_row(tmp_path):
    row = ("one\u2028two", *CHOICES[0][1:])
    rows(tmp_path / "mmlu" / "anatomy_test.csv", [row])
    (item,) = load_questions(TASKS["mmlu"], tmp_path / "mmlu", TaskOptions(shots=0)).items
    assert "one\u2028two" in item.context
    assert json.dumps(item.context)
